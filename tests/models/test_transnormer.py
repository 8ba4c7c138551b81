"""TransNormer's two variants and their sizes."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import DiagConfig
from brl_jax.models import TRANSNORMER_SIZES, DecoderConfig, DecoderLM, transnormer


def test_variants():
    t1, t2 = (transnormer(variant, DecoderConfig, block_size=32) for variant in ("t1", "t2"))
    assert (t1.mechanism, t2.mechanism) == (DiagConfig(32, "relu"), DiagConfig(32, "softmax"))
    assert (t1.late_mechanism.feature_map, t2.late_mechanism.feature_map) == ("elu", "elu+1")
    assert t1.ffn == t2.ffn == "swiglu"
    assert transnormer("t1", DecoderConfig, ffn="relu").ffn == "relu"
    assert transnormer("t1", DecoderConfig, attention_norm="layer").mechanism.norm == "layer"
    with pytest.raises(ValueError, match="variant must be one of 't1', 't2', got 't3'"):
        transnormer("t3", DecoderConfig)


def parameters(model, *inputs):
    shapes = jax.eval_shape(model.init, jax.random.key(0), *inputs)
    return sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(nn.unbox(shapes)))


@pytest.mark.parametrize("variant", ["t1", "t2"])
def test_parameters_are_the_papers(variant):
    """Table 4 counts 155.99M, which matches a GLU of 1365 with biases, 2/3 of a plain network's 2048; the table's 2048
    gives 162M."""
    size = {**TRANSNORMER_SIZES["wikitext103"], "vocab_size": 267744}
    tokens = jnp.zeros((1, 8), jnp.int32)
    narrow, wide = (
        DecoderLM(transnormer(variant, DecoderConfig, **size | d_ff)) for d_ff in ({}, {"d_ff": 2048})
    )
    assert parameters(narrow, tokens) == pytest.approx(155.99e6, abs=0.01e6)
    assert parameters(wide, tokens) == pytest.approx(162.29e6, abs=0.01e6)
    # The embedding, and for each layer attention, the GLU's matrices and biases, two norms and the attention's own.
    own_norms = 6 if variant == "t1" else 3
    glu = 3 * 512 * 1365 + 2 * 1365 + 512
    expected = 267744 * 512 + 6 * (4 * 512**2 + glu + 2 * 512) + (own_norms + 1) * 512
    assert parameters(narrow, tokens) == expected
