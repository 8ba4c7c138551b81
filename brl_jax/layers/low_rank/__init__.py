"""Layers around attention through few tokens."""
