"""What `gau_attention` passes to its GPU kernel, replaced here by a dense form in JAX.

tests/pallas_kernels/triton tests the kernel itself."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from pallas_kernels import triton
from tests.support.attention import close


def dense(query, key, value, ranges):
    """The kernel's formula. Each visible pair must lie in the query's range of keys and in the key's range of
    queries."""
    at_query, at_key = jnp.arange(query.shape[1])[None, :, None], jnp.arange(key.shape[1])[None, None]
    seen = (ranges.first[..., None] <= at_key) & (at_key < ranges.stop[..., None])
    seen_by = (ranges.begin[:, None] <= at_query) & (at_query < ranges.end[:, None])
    groups = query.shape[2] // key.shape[2]
    key, value = (jnp.repeat(x, groups, axis=2) for x in (key, value))
    weights = jnp.square(jax.nn.relu(jnp.einsum("btnh,bsnh->bnts", query, key)))
    return jnp.einsum("bnts,bsnv->btnv", jnp.where((seen & seen_by)[:, None], weights, 0), value)


@pytest.fixture
def in_jax(monkeypatch):
    for name in ("squared_relu_unsupported", "check_interpretation"):
        monkeypatch.setattr(triton, name, lambda *arguments: None)
    monkeypatch.setattr(triton, "squared_relu_attention", dense)


def random(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


IDS = jnp.asarray(np.repeat([[4, 2, 4], [1, 0, 7]], [7, 1, 12], axis=1))
LENGTHS = jnp.asarray([20, 5])


@pytest.mark.usefixtures("in_jax")
@pytest.mark.parametrize(
    ("options", "is_causal"),
    [
        ({"key_value_seq_lengths": LENGTHS}, False),
        ({"segment_ids": IDS, "key_value_seq_lengths": LENGTHS}, False),
        ({"segment_ids": IDS, "key_value_seq_lengths": LENGTHS}, True),
        ({"state": (3, 9)}, True),
    ],
    ids=("lengths", "segments", "causal segments", "state"),
)
def test_gau(options, is_causal):
    """Outputs and gradients with a bias equal XLA's."""
    arrays = [random(i, 2, 20, 2, 6) for i in range(3)] + [random(i, 2, 4) for i in (3, 4)]
    if "state" in options:
        state = brl_jax.init_gau_state(2, 2, 6, length=31)
        filled = [random(i, *x.shape) for i, x in zip((5, 6), state)]
        options = {"state": state._replace(key=filled[0], value=filled[1], length=jnp.asarray([3, 9]))}

    @functools.partial(jax.jit, static_argnums=0)
    def run(implementation, *arrays):
        def out(*arrays):
            return brl_jax.gau_attention(
                *arrays[:3], bias=brl_jax.RotaryBias(*arrays[3:]), is_causal=is_causal, chunk_size=8,
                implementation=implementation, **options,
            )  # fmt: skip

        result, pull = jax.vjp(out, *arrays)
        return result, pull(result)

    for got, want in zip(*(jax.tree.leaves(run(i, *arrays)) for i in ("triton_interpret", "xla"))):
        close(got, want)


@pytest.mark.usefixtures("in_jax")
@pytest.mark.parametrize(
    ("bias", "message"),
    [
        (brl_jax.ALiBi(brl_jax.alibi_slopes(2)), "bias must be None or a RotaryBias, got ALiBi"),
        (brl_jax.RotaryBias(jnp.ones((2, 4)), jnp.ones((2, 4))), "as many key heads as query heads, got 1 and 2"),
    ],
)  # fmt: skip
def test_what_the_kernel_of_gau_does_not_support(bias, message):
    query, key = random(0, 1, 9, 2, 6), random(1, 1, 9, 1, 6)
    with pytest.raises(
        NotImplementedError, match=f"gau_attention with implementation='triton_interpret': .*{message}"
    ):
        brl_jax.gau_attention(query, key, key, bias=bias, implementation="triton_interpret")
