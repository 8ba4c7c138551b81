"""Layers around attention through a small number of tokens."""
