"""Layers around attention with projected keys and values."""
