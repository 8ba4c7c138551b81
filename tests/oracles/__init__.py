"""References in float64 NumPy, straight from the formulas, one file a family; they share no code with the library.

NETWORKS of each file are whole networks of one mechanism each, one sequence at a time, which tests/laws compares with
ours. Everything in them is analytic (no absolute values, no comparisons of imaginary parts), so that derivatives come
from complex steps: f'(x) v = Im f(x + i eps v) / eps, exact to rounding. Parameters come as the library's nested
dictionaries, layers stacked on the first axis. Random draws are the library's, where a mechanism draws.

`attention` has the functions of query, key and value: softmax attention with its gradients, biases, and which pairs a
pattern sees.
"""
