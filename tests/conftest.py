"""Every test runs with strict promotion rules, so that a silent upcast or broadcast fails."""

import jax

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")
