"""The example in the protocol's docstring is a working mechanism."""

import textwrap
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import MECHANISMS
from brl_jax.layers.core import protocol
from brl_jax.layers.core.modules import dense, merge_heads
from brl_jax.models import Stack
from tests.laws.cases import dimensions
from tests.support.generation import in_pieces
from tests.support.parameters import drawn


@pytest.fixture(scope="module")
def mean_config():
    """The configuration of the docstring's example."""
    text = protocol.__doc__
    start, end = text.index("    class MeanCache"), text.index("To list it")
    names = {
        **vars(protocol),
        "NamedTuple": NamedTuple,
        "jax": jax,
        "dense": dense,
        "merge_heads": merge_heads,
    }
    names["__name__"] = __name__
    exec(compile(textwrap.dedent(text[start:end]), "the protocol's example", "exec"), names)
    return names["MeanConfig"]()


def test_the_example_works_in_a_network(mean_config):
    """It is causal, and generating in pieces, some with missing tokens, gives the outputs of training."""
    stack = Stack((mean_config,) * 2, dimensions(True))
    x = jax.random.normal(jax.random.key(0), (2, 9, 16))
    variables = drawn(stack.init, x)
    expected, _ = jax.jit(stack.apply)(variables, x)
    changed, _ = jax.jit(stack.apply)(variables, x.at[:, 5].set(3.0))
    np.testing.assert_array_equal(changed[:, :5], expected[:, :5])
    assert np.abs(changed[:, 5:] - expected[:, 5:]).max(axis=(0, 2)).min() > 1e-4
    np.testing.assert_allclose(
        in_pieces(stack, variables, x, (3, 1, 1, 3, 1))[0], expected, rtol=1e-4, atol=1e-5
    )


def test_the_example_ignores_tokens_that_do_not_exist(mean_config):
    layer = mean_config.layer(dimensions(True))
    x = jax.random.normal(jax.random.key(0), (2, 6, 16))
    variables = drawn(layer.init, x)
    expected, _, _ = layer.apply(variables, x)
    _, _, cache = layer.apply(variables, x.at[:, 3:].set(7.0), cache=layer.init_cache(2, 6), count=3)
    y, _, cache = layer.apply(variables, x[:, 3:], cache=cache)
    np.testing.assert_allclose(y, expected[:, 3:], rtol=1e-4, atol=1e-5)
    assert int(cache.length) == 6


def test_unsupported_flags_are_refused(mean_config):
    layer = mean_config.layer(dimensions(True))
    with pytest.raises(ValueError, match="MeanConfig cannot keep packed sequences apart"):
        layer.init(jax.random.key(0), jnp.ones((1, 2, 16)), segment_ids=jnp.zeros((1, 2), jnp.int32))


ONE_FORM = [
    config for make in MECHANISMS.values() if not ((config := make()).causal and config.bidirectional)
]


@pytest.mark.parametrize("config", ONE_FORM, ids=lambda config: type(config).__name__)
def test_a_layer_refuses_the_form_that_its_mechanism_lacks(config):
    """A user's own module may use a layer, with no network that checks its mechanism."""
    missing = "bidirectional" if config.causal else "causal"
    with pytest.raises(ValueError, match=f"has no {missing} form"):
        config.layer(dimensions(not config.causal)).init(jax.random.key(0), jnp.ones((1, 2, 16)))


@pytest.mark.parametrize("name", ["full", "local", "global_window", "native_sparse", "linear"])
def test_a_packed_row_with_a_cache_is_kept_apart_or_refused(name):
    """Token caches hold one sequence per row; a recurrent state is cleared where a sequence starts."""
    layer = MECHANISMS[name]().layer(dimensions(True))
    x, ids = jax.random.normal(jax.random.key(0), (1, 6, 16)), jnp.asarray([[0, 0, 0, 1, 1, 1]])
    variables = drawn(layer.init, x)
    cache = layer.init_cache(1, 6)
    if name == "linear":
        run = jax.jit(lambda cache: layer.apply(variables, x, cache=cache, segment_ids=ids)[0])
        expected, found = run(None), run(cache)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
        return
    with pytest.raises(ValueError, match="segment_ids must be None with a decoding cache"):
        layer.apply(variables, x, cache=cache, segment_ids=ids)
