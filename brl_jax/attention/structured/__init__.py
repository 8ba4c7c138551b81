"""Softmax attention with structured scores: multi-level low rank, bilinear forms, heads split by reach.

Equation numbers refer to "Customizing the Inductive Biases of Softmax Attention using Structured Matrices"
(arXiv:2509.07963).
"""
