"""cosFormer's `max_length`, which follows the length of the rows."""

import jax
import numpy as np
import pytest

from brl_jax.layers import CosformerConfig, FullConfig
from brl_jax.models import EncoderDecoderConfig
from tests.laws.cases import dimensions
from tests.support.generation import in_pieces
from tests.support.parameters import drawn


def test_max_length_follows_the_rows_and_the_cache():
    d = dimensions(True)
    layer = CosformerConfig(chunk_size=4).layer(d)
    x = jax.random.normal(jax.random.key(0), (2, 13, d.d_model))
    variables = drawn(layer.init, x)
    found, _, _ = layer.apply(variables, x)
    apply = {m: CosformerConfig(max_length=m, chunk_size=4).layer(d).apply for m in (13, 26)}
    np.testing.assert_array_equal(found, apply[13](variables, x)[0])
    # With a much longer half period the distance hardly matters, which made cosFormer blind to order on short rows.
    assert np.abs(apply[26](variables, x)[0] - found).max() > 1e-2
    outputs, cache = in_pieces(layer, variables, x, (6, 1, 6))
    np.testing.assert_allclose(outputs, found, rtol=1e-4, atol=1e-5)
    assert (int(cache.max_length), int(cache.length)) == (13, 13)
    with pytest.raises(ValueError, match=r"max_length=12 of the cosformer mechanism must be at least .* 13"):
        CosformerConfig(max_length=12).layer(d).init_cache(2, 13)
    with pytest.raises(ValueError, match="max_length must be at least 1, got 0"):
        CosformerConfig(max_length=0)


def test_a_text_shorter_than_the_rows_of_training_is_read_as_in_training():
    d = dimensions(True)
    trained = CosformerConfig(chunk_size=4).for_training(13)
    layer = trained.layer(d)
    x = jax.random.normal(jax.random.key(0), (2, 13, d.d_model))
    variables = drawn(layer.init, x)
    expected = layer.apply(variables, x)[0][:, :8]
    found, _, cache = layer.apply(variables, x[:, :8], cache=layer.init_cache(2, 8))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert int(cache.max_length) == 13
    # Beyond the training length, distances get the weights of a row of that length; `max_length` applies to all.
    pair = EncoderDecoderConfig(mechanism=FullConfig(), encoder_mechanism=CosformerConfig(chunk_size=4))
    assert pair.for_training(13).encoder.mechanism == trained
    assert EncoderDecoderConfig(mechanism=trained).for_training(9).encoder_mechanism is None
    assert (trained.furthest(20), trained.for_training(9).furthest(9)) == (20, 13)
    assert CosformerConfig(max_length=26).for_training(13).furthest(8) == 26
    with pytest.raises(ValueError, match="min_length must be at least 1, got 0"):
        CosformerConfig(min_length=0)
