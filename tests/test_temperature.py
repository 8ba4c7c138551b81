"""The temperature divides the logits."""

import jax
import numpy as np

from brl_jax.decoding import generate
from brl_jax.layers import FullConfig
from brl_jax.models import DecoderConfig, DecoderLM


def test_a_low_temperature_draws_the_likeliest():
    model = DecoderLM(
        DecoderConfig(num_layers=1, d_model=8, num_heads=2, d_ff=8, vocab_size=7, mechanism=FullConfig())
    )
    variables = jax.jit(model.init)(jax.random.key(0), np.zeros((1, 1), np.int32))
    prompts = np.tile(np.asarray([[1, 2, 3]], np.int32), (8, 1))
    tokens = {
        temperature: np.asarray(
            generate(
                model, variables, prompts, max_new_tokens=4, temperature=temperature, rng=jax.random.key(1)
            )
        )
        for temperature in (0.0, 1e-4, 1.0)
    }
    np.testing.assert_array_equal(tokens[1e-4], tokens[0.0])
    assert (tokens[1.0] != tokens[0.0]).any()
