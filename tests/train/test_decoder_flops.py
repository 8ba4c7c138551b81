"""Operation counts: attention's pairs counted one by one, the rest against a traced program."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import DeltaNetConfig, FullConfig, GlobalWindowConfig, LocalConfig, MLRConfig
from brl_jax.models import DecoderConfig, DecoderLM
from tests.oracles.local import local_mask
from train.engine.flops import matrix_flops
from train.tasks.decoder_flops import attention_products, decoder_multiplications, training_flops

MLR = MLRConfig(ranks=(4, 3, 1), block_sizes=(None, 12, 4))


def _pairs(mechanism, length):
    """For each pair of a row: the number of features in its score, and how many softmaxes weight its value."""
    i, j = np.arange(length)[:, None], np.arange(length)[None]
    past = (j <= i).astype(int)
    match mechanism:
        case FullConfig():
            return 8 * past, past
        case LocalConfig():
            seen = local_mask(length, DecoderConfig().dimensions, mechanism) & (past == 1)
            return 8 * seen, seen
        case GlobalWindowConfig(window=window, ranks=(first, second)):
            near = past * (i - j < window)
            return first * past + second * near, past + near
        case MLRConfig():
            scores = sum(
                rank * (past if size is None else past * (i // size == j // size))
                for rank, size in zip(mechanism.ranks, mechanism.block_sizes)
            )
            return scores, past


@pytest.mark.parametrize("length", [1, 3, 24, 29])
@pytest.mark.parametrize(
    "mechanism",
    [FullConfig(), LocalConfig(window=5), GlobalWindowConfig(window=4, ranks=(3, 5)), MLR],
    ids=str,
)
def test_pairs_are_counted_one_by_one(mechanism, length):
    scores, values = _pairs(mechanism, length)
    assert attention_products(mechanism, 8, length) == (scores.sum(), 8 * values.sum())


@pytest.mark.parametrize("ffn", ["relu", "gelu", "swiglu"])
def test_a_row_of_one_token_takes_what_its_program_multiplies(ffn):
    config = DecoderConfig(
        num_layers=3, d_model=16, num_heads=4, num_kv_heads=2, d_ff=24, ffn=ffn, vocab_size=11, mechanism=FullConfig()
    )  # fmt: skip
    model, token = DecoderLM(config), jnp.zeros((1, 1), jnp.int32)
    params = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), token))
    traced = matrix_flops(jax.jit(lambda p, t: model.apply(p, t)).trace(params, token).jaxpr, "cpu")
    assert 2 * sum(decoder_multiplications(config, 1)) == traced
    assert training_flops(config, 1) == 3 * traced


def test_other_mechanisms_are_refused():
    with pytest.raises(ValueError, match="mechanism deltanet: its multiplications are not counted"):
        decoder_multiplications(DecoderConfig(mechanism=DeltaNetConfig()), 8)
    with pytest.raises(ValueError, match="mechanism local: its multiplications are not counted"):
        attention_products(LocalConfig(pattern="dilated"), 8, 8)
