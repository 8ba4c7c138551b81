"""Causal attention whose past is a state of fixed size, computed chunk by chunk."""
