"""Layers around full and block-diagonal softmax attention."""
