"""Attention of every query on every key, or on every key of its block."""
