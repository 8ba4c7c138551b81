"""Synthesizer's function against its oracle: several blocks of queries, padding, offsets, gradients."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import synthesizer_attention
from tests.oracles.attention import relative_error
from tests.oracles.dense import synthesizer
from tests.support.attention import check

B, L, N, K, R, V = 3, 300, 4, 2, 5, 6
RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# More queries than fit in one block.
VALUE, COLUMNS, BIAS = array(B, L - 7, K, V), array(L, N, R), array(L, N)
ROWS = {"random": array(L - 7, N, R), "dense": array(B, L - 7, N, R)}


@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ROWS)
def test_outputs_and_gradients_equal_the_oracle(form, is_causal):
    def oracle(value, rows, *others):
        every = [rows] * B if form == "random" else rows
        return np.stack([synthesizer(v, r, *others, is_causal=is_causal) for v, r in zip(value, every)])

    function = functools.partial(synthesizer_attention, is_causal=is_causal)
    check(function, oracle, [np.float64(x) for x in (VALUE, ROWS[form], COLUMNS, BIAS)])


@pytest.mark.parametrize("form", ["dense", pytest.param("random", marks=pytest.mark.slow)])
def test_padding_is_not_read(form):
    lengths, rows = jnp.asarray([9, 0, 4]), ROWS[form][..., :12, :, :]
    absent = jnp.arange(12)[None, :, None, None] >= lengths[:, None, None, None]
    value = jnp.where(absent, jnp.nan, VALUE[:, :12])
    rows = rows if form == "random" else jnp.where(absent, jnp.nan, rows)
    out = synthesizer_attention(
        value, rows, COLUMNS, BIAS, query_seq_lengths=lengths, key_value_seq_lengths=lengths
    )
    for b, n in enumerate(lengths):
        assert not np.asarray(out[b, n:]).any()
        if n:
            own = ROWS[form] if form == "random" else ROWS[form][b]
            alone = synthesizer(*map(np.float64, (VALUE[b, :n], own, COLUMNS, BIAS)))
            assert relative_error(out[b, :n], alone) < 1e-5
