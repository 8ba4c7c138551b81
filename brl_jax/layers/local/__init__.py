"""Layers around local attention."""
