"""Layers around attention with a state of fixed size."""
