"""Attention mechanisms as pure functions: arrays in, arrays out. No Flax, no I/O, no device queries."""
