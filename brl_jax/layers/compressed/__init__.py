"""Layers that read the past through a few compressed tokens."""
