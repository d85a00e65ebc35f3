"""Placement types, the rules that propagate them through ATen ops, and the sharder that applies both to a graph."""
