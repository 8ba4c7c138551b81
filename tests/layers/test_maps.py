"""Layers expose the attention matrices that they compute their outputs with."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import MECHANISMS, Dimensions
from brl_jax.models import Stack
from tests.marks import slow_unless
from tests.support.parameters import drawn

# These do nothing between the matrix and the output projection.
PLAIN = {
    "full": {},
    "local": {"window": 4},
    "diag": {"block_size": 4},
    "linformer": {"num_projected": 3, "max_length": 16},
    "nystromformer": {"num_landmarks": 3},
    "informer": {"factor": 1},
    "reformer": {"num_buckets": 4, "chunk_size": 2},
    "sinkhorn": {"block_size": 3, "max_length": 16},
    "flowformer": {"chunk_size": 4},
    "kernelized": {},
    "synthesizer": {"rank": 3, "max_length": 16},
    "skyformer": {"num_samples": 4},
    "hopfield": {},
    "linear": {"chunk_size": 4},
    "cosformer": {"chunk_size": 4},
    "performer": {"chunk_size": 4},
    "bsbr": {"chunk_size": 4},
    "mlr": {"ranks": (2, 2), "block_sizes": (None, 4)},
    "bilinear_mlr": {},
    "bilinear_btt": {},
    "global_window": {"window": 4},
}
LENGTH = 10


def _layer(name, options):
    config = MECHANISMS[name](**options)
    dimensions = Dimensions(16, 4, 2, 4, 16, is_causal=config.causal)
    return config.layer(dimensions)


def _inputs(layer):
    x = jax.random.normal(jax.random.key(0), (2, LENGTH, 16))
    return x, drawn(layer.init, x)


def _apply(layer, variables, x, **options):
    return jax.jit(functools.partial(layer.apply, **options))(variables, x)


@pytest.mark.parametrize("name", slow_unless(PLAIN, ("full", "local", "linear", "bilinear_mlr")))
def test_weights_times_values_are_the_output(name):
    layer = _layer(name, PLAIN[name])
    x, variables = _inputs(layer)
    assert "maps" not in variables  # quadratic, so it is computed only on request
    (y, _, _), sown = _apply(layer, variables, x, mutable="maps")
    (weights,) = sown["maps"]["weights"]
    assert weights.shape == (2, 4, LENGTH, LENGTH)
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), variables["params"])
    value = np.einsum("btd,dnh->btnh", x, params["value"]["kernel"])
    attended = np.einsum("bnts,bsnh->btnh", weights, np.repeat(value, 2, axis=2))
    np.testing.assert_allclose(
        np.einsum("btnh,nhd->btd", attended, params["out"]["kernel"]), y, rtol=1e-3, atol=1e-5
    )
    np.testing.assert_allclose(_apply(layer, variables, x)[0], y, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name for name, kind in MECHANISMS.items() if kind().causal and name not in ("brl", "luna")]
)
def test_no_weight_on_the_future_and_none_while_decoding(name):
    layer = _layer(name, PLAIN.get(name, {}))
    x, variables = _inputs(layer)
    _, sown = _apply(layer, variables, x, mutable="maps")
    (weights,) = sown["maps"]["weights"]
    assert bool(jnp.isfinite(weights).all())
    np.testing.assert_array_equal(np.triu(np.asarray(weights), 1), 0)
    # With ReLU features, a query may have nothing in common with any of its keys.
    sees = np.abs(np.asarray(weights)).sum(-1) > 0
    assert sees.all() if name != "cosformer" else sees.mean() > 0.5
    _, sown = _apply(layer, variables, x, cache=layer.init_cache(2, LENGTH), mutable="maps")
    assert not sown


def test_compressed_tokens_show_what_they_read_of_this_input():
    """One map of each kind, for this sequence: initializing leaves none behind."""
    config = MECHANISMS["brl"](window=4, num_compressed=3)
    stack = Stack((config,), Dimensions(16, 4, 2, 4, 16, is_causal=False))
    x, variables = _inputs(stack)
    assert "maps" not in variables

    def maps(x):
        sown = _apply(stack, variables, x, mutable="maps")[1]["maps"]["layers_0"]["block_0"]["mixer"]
        (read,), (given,) = sown["compressed"]["compress"], sown["propagate"]
        return read[0], given[0]

    (read, given), (other, _) = maps(x[:1]), maps(x[1:])
    assert read.shape == (1, 4, 3, LENGTH)
    assert given.shape == (1, 4, LENGTH, 3)
    assert np.abs(read - other).max() > 1e-3
