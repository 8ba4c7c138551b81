"""Sequences of vectors in and out, with any listed mechanism."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import Regressor, RegressorConfig
from brl_jax.layers import MECHANISMS, FullConfig
from brl_jax.models.inputs import sinusoidal_positions


def small(mechanism, **changes):
    layers = max(2, mechanism.group)
    settings = {
        "num_layers": layers,
        "d_model": 16,
        "num_heads": 2,
        "d_ff": 16,
        "num_inputs": 3,
        "num_outputs": 2,
    }
    return RegressorConfig(**(settings | {"mechanism": mechanism, "max_length": 12} | changes))


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanism_fits(name):
    """Traced, not compiled: causal and not, or refused."""
    mechanism = MECHANISMS[name]()
    for is_causal, can in ((True, mechanism.causal), (False, mechanism.bidirectional)):
        if not can:
            with pytest.raises(ValueError, match=r"has no (causal|bidirectional) form"):
                small(mechanism, is_causal=is_causal)
            continue
        model = Regressor(small(mechanism, is_causal=is_causal, mup_base_width=8))
        inputs = jnp.ones((2, 10, 3))
        y = jax.eval_shape(lambda x, model=model: model.init_with_output(jax.random.key(0), x)[0], inputs)
        assert (y.shape, y.dtype) == ((2, 10, 2), jnp.float32)


@pytest.mark.slow
def test_positions_and_read_out():
    x = jax.random.normal(jax.random.key(1), (1, 6, 3))
    model = Regressor(small(FullConfig(), positions="sinusoidal", num_layers=1))
    variables, run = nn.unbox(jax.jit(model.init)(jax.random.key(0), x)), jax.jit(model.apply)
    np.testing.assert_array_equal(run(variables, x), np.zeros((1, 6, 2)))  # the initial network predicts 0
    params = variables["params"]
    # Unequal weights, since a norm's outputs sum to 0.
    kernel = jax.random.normal(jax.random.key(2), params["read_out"]["kernel"].shape)
    params = {**params, "read_out": {**params["read_out"], "kernel": kernel}}
    y = np.asarray(run({"params": params}, x))
    # Reorders earlier tokens, which full attention without positions would not notice.
    swapped = np.asarray(run({"params": params}, x[:, jnp.array([1, 0, 2, 3, 4, 5])]))
    assert np.abs(swapped[:, 5] - y[:, 5]).max() > 1e-4
    # The added term equals what the embedding could have added.
    embedded = x @ params["embedding"]["kernel"] + params["embedding"]["bias"][None, None]
    table = sinusoidal_positions(jnp.arange(6), 16)[None]
    bare = {"kernel": jnp.eye(16), "bias": jnp.zeros(16)}
    plain = Regressor(small(FullConfig(), positions="learned", num_layers=1, num_inputs=16))
    given = {**params, "embedding": bare, "positions": jnp.pad(table[0], ((0, 6), (0, 0)))}
    np.testing.assert_allclose(jax.jit(plain.apply)({"params": given}, embedded), y, rtol=1e-4, atol=1e-5)


def test_bad_input_is_named():
    model = Regressor(small(FullConfig()))
    for shape, message in (
        ((2, 5, 4), r"shape \(batch, length, 3\)"),
        ((2, 13, 3), "inputs must be at most max_length=12 per row, got 13"),
    ):
        with pytest.raises(ValueError, match=message):
            jax.eval_shape(model.init, jax.random.key(0), jnp.ones(shape))
