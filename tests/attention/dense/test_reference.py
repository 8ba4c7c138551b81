"""Each function of the dense and low-rank families against its plain form in `reference.py`, at ragged lengths."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from brl_jax.attention.dense import reference as dense
from brl_jax.attention.low_rank import reference as low_rank
from tests.attention.local.test_local import random_qkv
from tests.oracles import attention as oracles


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32) / 4


CASES = [
    *((dense, "full_attention", {"is_causal": causal}) for causal in (True, False)),
    *((dense, "diag_attention", {"block_size": 7, "is_causal": causal}) for causal in (True, False)),
    (dense, "diag_attention", {"block_size": 7, "score": "relu", "scale": 0.3, "is_causal": True}),
    *((dense, "hopfield_attention", {"steps": 3, "is_causal": causal}) for causal in (True, False)),
    (dense, "kernelized_attention", {"scale": 0.3}),
    (
        low_rank,
        "linformer_attention",
        {"key_projection": normal(6, 80), "value_projection": normal(6, 90), "scale": 0.3},
    ),
]


@pytest.mark.parametrize("length", [1, 37, 64])
@pytest.mark.parametrize(("module", "name", "options"), CASES)
def test_equals_its_plain_form(module, name, options, length):
    function, plain = (getattr(owner, name) for owner in (brl_jax, module))
    got, expected = jax.jit(lambda *a: [f(*a, **options) for f in (function, plain)])(*random_qkv(length)[:3])
    assert oracles.relative_error(got, expected) < 1e-5
