"""Differential cross-attention from a few compressed tokens to a history."""
