"""Joint tracing of forward and backward, one template per kind of layer."""
