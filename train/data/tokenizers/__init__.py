"""Tokenizers: the interface, those that are learnt here, and those that others have published."""
