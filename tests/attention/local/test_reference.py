"""The plain form equals the float64 oracle, and the fast one equals both."""

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.local import reference
from tests.attention.local.test_local import PATTERNS, random_qkv, xla_attention
from tests.oracles import attention as oracles


@pytest.mark.parametrize("name", PATTERNS)
def test_plain_form(name):
    pattern, sees = PATTERNS[name]
    query, key, value, _ = random_qkv(130)
    lengths = np.array([130, 77])
    segments = np.sort(np.random.default_rng(0).integers(0, 3, (2, 130)), axis=1)
    visible = oracles.pairs(130, 130, sees, is_causal=pattern.causal_ok)[None]
    visible = visible & (segments[:, :, None] == segments[:, None, :])
    visible = visible & (np.arange(130)[None, None, :] < lengths[:, None, None])
    options = {
        "pattern": pattern,
        "is_causal": pattern.causal_ok,
        "scale": 0.3,
        "key_value_seq_lengths": jnp.asarray(lengths, jnp.int32),
        "segment_ids": (jnp.asarray(segments, jnp.int32),) * 2,
    }
    plain = reference.local_attention(query, key, value, **options)
    expected, _ = oracles.softmax_attention(query, key, value, visible[:, None], scale=0.3)
    assert oracles.relative_error(plain, expected) < 1e-5
    assert oracles.relative_error(xla_attention(query, key, value, **options), plain) < 1e-5
