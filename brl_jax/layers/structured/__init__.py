"""Layers around structured softmax attention."""
