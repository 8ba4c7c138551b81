"""The stack of blocks: where its parameters come from."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from brl_jax.layers import BRLConfig, FullConfig, LinearConfig, LocalConfig, Mamba2Config
from brl_jax.models import Stack
from brl_jax.models.stack import _POLICIES, _is_kept
from tests.laws.cases import dimensions
from tests.marks import slow_unless
from tests.support.parameters import drawn


@pytest.mark.parametrize("length", slow_unless([16, 20], (20,)))
def test_initialising_with_segments_makes_the_parameters_of_a_token(length):
    """Networks with a queue of outputs run segment by segment and create their parameters inside the loop."""
    stack = Stack(
        (BRLConfig(window=5, num_compressed=3, block_size=8, memory="output"),) * 2, dimensions(True)
    )

    def shapes(length):
        made = jax.eval_shape(stack.init, jax.random.key(0), jnp.ones((1, length, 16)))
        return [(path, leaf.shape) for path, leaf in jax.tree.leaves_with_path(made["params"])]

    assert shapes(1)
    assert shapes(length) == shapes(1)


@pytest.mark.parametrize(
    "mechanism",
    slow_unless([FullConfig(), LocalConfig(window=2), LinearConfig()], (LocalConfig(window=2),)),
)
def test_more_tokens_than_a_cache_holds_are_refused(mechanism):
    stack = Stack((mechanism,), dimensions(True))
    x = jnp.ones((1, 5, 16))
    variables = drawn(stack.init, x)
    cache = stack.init_cache(1, 4)
    with pytest.raises(
        ValueError, match=r"cache: has room for 4 tokens, got 5 after 0; init_cache\(batch, length\)"
    ):
        stack.apply(variables, x, cache=cache)
    _, cache = stack.apply(variables, x[:, :4], cache=cache)
    with pytest.raises(ValueError, match="got 1 after 4"):
        stack.apply(variables, x[:, :1], cache=cache)


def test_layers_keep_no_elementwise_results_for_the_backward_pass(monkeypatch):
    def temporary_bytes():
        stack = Stack((FullConfig(),) * 4, dimensions(True))
        x = jax.ShapeDtypeStruct((4, 64, 16), jnp.float32)
        variables = jax.eval_shape(stack.init, jax.random.key(0), x)
        gradient = jax.jit(jax.grad(lambda variables, x: stack.apply(variables, x)[0].sum()))
        return gradient.lower(variables, x).compile().memory_analysis().temp_size_in_bytes

    ours = temporary_bytes()
    monkeypatch.setitem(_POLICIES, "none", jax.checkpoint_policies.everything_saveable)
    assert ours < 0.8 * temporary_bytes()


@pytest.mark.parametrize("ffn", ["glu_relu", "swiglu", "geglu", "geglu_erf"])
def test_layers_keep_no_results_of_activations_or_rotations(ffn, monkeypatch):
    kept = set()

    def policy(primitive, *_, **params):
        if keeps := _is_kept(primitive, **params):
            kept.add(primitive.name)
        return keeps

    monkeypatch.setitem(_POLICIES, "none", policy)
    mechanisms = (LocalConfig(), Mamba2Config(), BRLConfig())
    stack = Stack(mechanisms, dataclasses.replace(dimensions(True), ffn=ffn))
    x = jax.ShapeDtypeStruct((2, 512, 16), jnp.float32)
    variables = jax.eval_shape(stack.init, jax.random.key(0), x)
    jax.make_jaxpr(jax.grad(lambda variables, x: stack.apply(variables, x)[0].sum()))(variables, x)
    assert kept <= {"dot_general", "reduce_sum", "cos", "sin", "rem", "by_platform"}
