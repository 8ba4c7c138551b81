"""Attention of every query to every key."""
