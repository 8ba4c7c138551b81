"""Attention over listed blocks of keys."""
