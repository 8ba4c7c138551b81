"""Float64 NumPy references, straight from the formulas, one file per family; they share no code with the library.

Each file's NETWORKS are whole networks of one mechanism, for one sequence at a time; tests/laws compares them with
ours. All their operations are analytic (no absolute values, no comparisons of imaginary parts), so complex steps give
derivatives: f'(x) v = Im f(x + i eps v) / eps, exact to rounding. They take the library's nested dictionaries of
parameters, with layers stacked on the first axis. Mechanisms that draw at random use the library's draws.

`attention` has the functions of query, key and value: softmax attention with its gradients, biases, and which pairs a
pattern sees."""
