"""Float64 NumPy references, straight from the formulas, one file per family; they share no code with the library.

A function takes the arrays of one sequence, (n, heads, h), and returns the output of all heads;
tests/attention/test_oracles.py compares it with ours. NETWORKS are whole networks of one mechanism, for one sequence,
which tests/laws compares with ours. They take the library's nested dictionaries of parameters, with layers stacked on
the first axis. Mechanisms that draw at random use the library's draws.

All operations are analytic (no absolute values, no comparisons of imaginary parts), so complex steps give derivatives:
f'(x) v = Im f(x + i eps v) / eps, exact to rounding.

`attention` has softmax attention for a batch, with its gradients by hand, biases, and which pairs a pattern sees."""
