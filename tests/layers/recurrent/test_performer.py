"""Performer draws the same features as in training: one key gives the same features wherever a network is called."""

import jax
import jax.numpy as jnp
import pytest

from brl_jax.layers import PerformerConfig
from brl_jax.models import DecoderConfig, DecoderLM
from tests.support.numbers import relative_error
from tests.support.parameters import drawn

SIZE = {"vocab_size": 11, "num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 16}
TOKENS = jax.random.randint(jax.random.key(0), (2, 9), 0, 11)


def networks(**options):
    model = DecoderLM(DecoderConfig(mechanism=PerformerConfig(chunk_size=4), **SIZE, **options))
    return model, drawn(model.init, TOKENS)


@pytest.mark.slow
def test_single_tokens_have_the_features_of_the_prompt():
    model, variables = networks()
    run = jax.jit(
        lambda tokens, cache, key: model.apply(variables, tokens, cache=cache, rngs={"projection": key})
    )
    key, other = jax.random.split(jax.random.key(2))
    whole, _ = run(TOKENS, model.init_cache(2, 9), key)
    logits, cache = run(TOKENS[:, :8], model.init_cache(2, 9), key)
    step, _ = run(TOKENS[:, 8:], cache, key)
    assert relative_error(jnp.concatenate([logits, step], axis=1), whole) < 1e-5
    assert relative_error(run(TOKENS[:, 8:], cache, other)[0], step) > 1e-4


@pytest.mark.parametrize("reversible", [False, True])
def test_a_key_draws_the_features(reversible):
    model, variables = networks(reversible=reversible)
    run = jax.jit(lambda rngs: model.apply(variables, TOKENS, rngs=rngs)[0])
    first, again, other, own = (
        run(rngs)
        for rngs in (
            {"projection": jax.random.key(2)},
            {"projection": jax.random.key(2)},
            {"projection": jax.random.key(3)},
            {},
        )
    )
    assert relative_error(again, first) == 0
    assert relative_error(other, first) > 1e-4
    assert relative_error(own, first) > 1e-4
