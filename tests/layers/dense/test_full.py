"""Dropout of the attention weights, against the weights themselves."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import FullConfig
from tests.laws.cases import dimensions
from tests.support.numbers import as_float64, relative_error

RATE = 0.25


@pytest.mark.parametrize("is_causal", [True, False])
def test_dropout_applies_to_the_softmax_over_all_keys(is_causal, monkeypatch):
    d = dimensions(is_causal, rope_theta=None)
    layer = FullConfig(dropout=RATE).layer(d)
    x = jax.random.normal(jax.random.key(0), (3, 9, d.d_model))
    positions = jnp.arange(9)[None]
    lengths = None if is_causal else jnp.asarray([9, 4, 0])
    keep = np.asarray(jax.random.bernoulli(jax.random.key(3), 1 - RATE, (3, d.num_heads, 9, 9)))
    monkeypatch.setattr(jax.random, "bernoulli", lambda key, p, shape: jnp.asarray(keep).reshape(shape))
    call = {"carry": None, "cache": None, "positions": positions, "lengths": lengths}
    variables = nn.unbox(jax.jit(lambda key: layer.init(key, x, **call))(jax.random.key(1)))

    @functools.partial(jax.jit, static_argnums=1)
    def run(x, deterministic):
        rngs = {"dropout": jax.random.key(2)}
        return layer.apply(variables, x, deterministic=deterministic, rngs=rngs, **call)[0]

    w = {name: own["kernel"] for name, own in as_float64(variables["params"]).items()}
    q, k, v = (np.einsum("btd,dnh->bnth", as_float64(x), w[name]) for name in ("query", "key", "value"))
    k, v = (np.repeat(each, d.num_heads // d.num_kv_heads, axis=1) for each in (k, v))
    scores = q @ k.swapaxes(-1, -2) / np.sqrt(d.head_dim)
    seen = (
        np.tril(np.ones((9, 9), bool))
        if is_causal
        else np.arange(9) < np.asarray(lengths)[:, None, None, None]
    )
    weights = np.where(seen, np.exp(scores), 0)
    weights /= np.maximum(weights.sum(-1, keepdims=True), 1e-9)  # an empty row sees nothing
    for kept, deterministic in ((keep / (1 - RATE), False), (1.0, True)):
        expected = np.einsum("bnth,nhd->btd", (weights * kept) @ v, w["out"])
        assert relative_error(run(x, deterministic), expected) < 1e-5
    # A decoder's first token sees only itself, and some heads drop that.
    assert np.isfinite(jax.grad(lambda x: jnp.sum(run(x, False) ** 2))(x)).all()
    assert not is_causal or not keep[:, :, 0, 0].all()


@pytest.mark.slow
def test_the_random_numbers_are_of_the_stream_dropout():
    d = dimensions(False)
    layer = FullConfig(dropout=RATE).layer(d)
    x = jax.random.normal(jax.random.key(0), (1, 64, d.d_model))
    call = {"carry": None, "cache": None, "positions": jnp.arange(64)[None]}
    variables = jax.jit(lambda key: layer.init(key, x, **call))(jax.random.key(1))

    @jax.jit
    def run(seed):
        return layer.apply(variables, x, deterministic=False, rngs={"dropout": jax.random.key(seed)}, **call)[
            0
        ]

    assert jnp.array_equal(run(0), run(0))
    # The mean over many draws approaches the output without dropout.
    outputs = jnp.stack([run(seed) for seed in range(60)])
    plain = layer.apply(variables, x, deterministic=True, **call)[0]
    assert relative_error(outputs.mean(0), as_float64(plain)) < 0.15
    assert relative_error(outputs[0], as_float64(plain)) > 0.2
