"""Recognition: where a plain graph contains an MoE layer, and what the layer's experts compute."""

from moecompile.recognition.layers import ACCEPTED, Layer, find_layers

__all__ = ["ACCEPTED", "Layer", "find_layers"]
