"""Layers around full softmax attention."""
