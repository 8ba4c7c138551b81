"""linformer_attention: padding, and what it refuses."""

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.low_rank.linformer import linformer_attention
from tests.support.attention import random_qkv


def projections(shape, seed=3, dtype=jnp.float32):
    rng = np.random.default_rng(seed)
    return [jnp.asarray(rng.standard_normal(shape) / np.sqrt(shape[-1]), dtype) for _ in range(2)]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"value_projection": jnp.ones((4, 3, 6))},
            r"value_projection must have shape \(rows, length\) or \(2, rows, length\), got \(4, 3, 6\)",
        ),
        (
            {"key_projection": jnp.ones((3, 6), jnp.bfloat16)},
            "key_projection must have key's dtype float32, got bfloat16",
        ),
    ],
)
def test_bad_input(changes, message):
    arguments = {"key_projection": jnp.ones((3, 6)), "value_projection": jnp.ones((3, 6))} | changes
    with pytest.raises(ValueError, match=message):
        linformer_attention(*random_qkv(6)[:3], **arguments)
