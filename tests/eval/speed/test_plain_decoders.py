"""The authors' two baselines compute what the plain decoder computes."""

import functools

import jax
import jax.numpy as jnp
import pytest

from eval.speed.generation import PLAIN, GenerationOptions
from eval.speed.plain_decoders import concatenated_step, empty_rows, reread_step
from tests.support.numbers import as_float64, relative_error
from tests.support.parameters import drawn

OPTIONS = GenerationOptions(
    lengths=(4,), heads=2, head_dim=8, layers=3, window=4, context=4, hidden=1, vocabulary=11
)


@pytest.mark.slow
def test_steps_equal_the_forward_pass():
    model = OPTIONS.model(PLAIN)
    tokens = jax.random.randint(jax.random.key(0), (1, 3), 0, 11)
    params = drawn(model.init, tokens)
    expected = as_float64(jax.jit(model.apply)(params, tokens)[0])
    rows = empty_rows(model, 0)
    reread = jax.jit(functools.partial(reread_step, model))
    for place in range(3):
        logits, rows = reread(params, tokens[:, : place + 1], rows)
        assert relative_error(logits[:, 0], expected[:, place]) < 1e-5
    assert rows[0].shape == (3, 1, 3, 2, 8)

    _, cache = jax.jit(model.apply)(params, tokens[:, :1], cache=model.init_cache(1, 1))
    step = jax.jit(concatenated_step, static_argnums=(0, 1))
    for place in range(1, 3):
        logits, cache = step(model, place, params, tokens[:, place : place + 1], cache)
        assert relative_error(logits[:, 0], expected[:, place]) < 1e-5
    assert jax.tree.all(
        jax.tree.map(lambda a, b: a.shape == b.shape, cache, jax.eval_shape(lambda: model.init_cache(1, 3)))
    )
    assert jnp.all(cache.length == 3)
