"""Synthesizer's function against its plain form: several blocks of queries, padding, offsets, gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import synthesizer_attention
from brl_jax.attention.dense import reference
from tests.oracles.attention import relative_error

B, L, N, K, R, V = 3, 300, 4, 2, 5, 6
RNG = np.random.default_rng(0)


def array(*shape):
    return RNG.normal(size=shape).astype(np.float32)


# More queries than fit in one block.
VALUE, COLUMNS, BIAS = array(B, L - 7, K, V), array(L, N, R), array(L, N)
ROWS = {"random": array(L - 7, N, R), "dense": array(B, L - 7, N, R)}


@pytest.mark.parametrize("is_causal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ROWS)
def test_outputs_and_gradients_equal_the_plain_form(form, is_causal):
    weight = array(B, L - 7, N, V)

    def both(function):
        def loss(*arrays):
            out = function(*arrays, is_causal=is_causal)
            return jnp.sum(out * weight), out

        return jax.grad(loss, argnums=(0, 1, 2, 3), has_aux=True)(VALUE, ROWS[form], COLUMNS, BIAS)

    got, expected = jax.jit(
        lambda: [both(f) for f in (synthesizer_attention, reference.synthesizer_attention)]
    )()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 1e-5


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
            own = ROWS[form][:n] if form == "random" else ROWS[form][b : b + 1, :n]
            alone = reference.synthesizer_attention(VALUE[b : b + 1, :n], own, COLUMNS, BIAS)
            assert relative_error(out[b : b + 1, :n], alone) < 1e-5
