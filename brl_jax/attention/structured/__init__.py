"""Softmax attention with structured scores: multi-level low rank, bilinear forms, heads split by reach.

`reference.py` gives the plain meaning of each function and is the place to begin. The papers' equations are those of
"Customizing the Inductive Biases of Softmax Attention using Structured Matrices" (arXiv:2509.07963).
"""
