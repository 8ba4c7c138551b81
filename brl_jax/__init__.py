"""Linear-cost attention for JAX, from one laptop core to a TPU pod."""
