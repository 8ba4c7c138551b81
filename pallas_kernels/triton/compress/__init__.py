"""Differential cross-attention from a history into a few tokens."""
