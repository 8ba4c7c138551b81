"""Layers with two residual streams: ordinary differentiation's gradients in one layer's memory."""

import dataclasses
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import BRLConfig, DecoderConfig, FullConfig, GAUConfig, LocalConfig, ReformerConfig, Stack
from brl_jax.models.block import Block
from brl_jax.models.reversible import reversible_layers
from tests.laws.cases import dimensions
from tests.support.generation import in_pieces
from tests.support.numbers import relative_error
from tests.support.parameters import drawn

D = dataclasses.replace(dimensions(True), reversible=True)
REFORMER = ReformerConfig(num_rounds=2, num_buckets=4, chunk_size=4)
ALTERNATE = (LocalConfig(window=3), FullConfig(), LocalConfig(window=3), FullConfig())


def made(mechanisms, d=D, length=9):
    stack = Stack(mechanisms, d)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, length, d.d_model)), jnp.float32)
    return stack, drawn(stack.init, x), x


def ordinary(stack, variables, x, **call):
    """The same function without reversal: a call that collects sown values runs the plain scan."""
    return stack.apply(variables, x, mutable=("intermediates",), **call)[0][0]


@pytest.mark.parametrize(
    "mechanisms",
    [ALTERNATE, pytest.param((REFORMER,) * 3, marks=pytest.mark.slow)],
    ids=["alternate", "reformer"],
)
def test_gradients_equal_ordinary_differentiation(mechanisms):
    stack, variables, x = made(mechanisms)
    call = {"positions": jnp.arange(3, 12)[None]}
    weight = jnp.cos(jnp.arange(x.size).reshape(x.shape))

    def both(run):
        return jax.jit(jax.value_and_grad(lambda v, x: (weight * run(v, x)).sum(), argnums=(0, 1)))(
            variables, x
        )

    got = both(lambda v, x: stack.apply(v, x, **call)[0])
    expected = both(lambda v, x: ordinary(stack, v, x, **call))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 2e-5


@pytest.mark.slow
def test_the_streams_follow_the_paper():
    """y1 = x1 + mix(norm(x2)), y2 = x2 + ffn(norm(y1)), starting from two copies of the embedding and ending with the
    mean."""
    stack, variables, x = made((LocalConfig(window=3),) * 2)
    bound = stack.bind(variables)
    x1 = x2 = x
    for layer in range(2):
        params = jax.tree.map(operator.itemgetter(layer), variables["params"]["layers_0"]["block_0"])
        block = Block(LocalConfig(window=3), D).bind({"params": params})
        call = {"positions": None, "lengths": None, "segment_ids": None, "count": None}
        x1 = x1 + block.mixer(block.mixer_norm(x2), carry=None, cache=None, deterministic=True, **call)[0]
        x2 = x2 + block.feed_forward(block.feed_forward_norm(x1))
    np.testing.assert_allclose(stack.apply(variables, x)[0], bound.final_norm((x1 + x2) / 2), atol=2e-6)


def test_generation_is_training():
    stack, variables, x = made(ALTERNATE)
    outputs, _ = in_pieces(stack, variables, x, [1] * 9)
    np.testing.assert_allclose(outputs, stack.apply(variables, x)[0], atol=2e-5)


@pytest.mark.slow
def test_dropout_is_the_same_in_the_backward_pass(monkeypatch):
    stack, variables, x = made(ALTERNATE, dataclasses.replace(D, dropout=0.3))

    def slope(seed=1):
        def loss(v, x):
            y = stack.apply(v, x, deterministic=False, rngs={"dropout": jax.random.key(seed)})[0]
            return (jnp.sin(y) * jnp.cos(jnp.arange(y.size).reshape(y.shape))).sum()

        return jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))(variables, x)

    got, other = slope(), slope(seed=2)
    monkeypatch.setattr("brl_jax.models.stack.reversible_layers", reversible_layers.__wrapped__)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(slope()), strict=True):
        assert relative_error(a, b) < 2e-5
    assert relative_error(got[1][1], other[1][1]) > 0.1


@pytest.mark.slow
def test_memory_does_not_grow_with_the_layers():
    def temporary(reversible, layers):
        d = dataclasses.replace(dimensions(True), reversible=reversible)
        stack, variables, x = made((LocalConfig(window=8),) * layers, d, length=512)
        slope = jax.jit(jax.grad(lambda v, x: stack.apply(v, x)[0].sum(), argnums=1))
        return slope.lower(variables, x).compile().memory_analysis().temp_size_in_bytes

    few, many = temporary(True, 4), temporary(True, 32)
    assert many < 1.1 * few
    assert temporary(False, 32) > 4 * many  # The plain network's memory does grow.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remat": "full"}, "remat must be 'none' with reversible layers, got 'full'"),
        ({"mechanism": BRLConfig()},
         "reversible must be False with mechanism brl, whose layers pass on more than the residual stream"),
        ({"mechanism": GAUConfig()},
         "reversible must be False with mechanism gau, whose layers are not a mixer and a feed-forward"),
    ],
)  # fmt: skip
def test_what_cannot_be_reversed(changes, message):
    sizes = {"num_layers": 2, "d_model": 16, "num_heads": 2, "vocab_size": 8, "mechanism": FullConfig()}
    with pytest.raises(ValueError, match=message):
        DecoderConfig(**sizes | {"reversible": True} | changes).dimensions  # noqa: B018
