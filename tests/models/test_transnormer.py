"""TransNormer's two variants, their sizes and the ablations of the paper."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import DiagConfig, NormConfig
from brl_jax.models import TRANSNORMER_SIZES, DecoderConfig, DecoderLM, Stack, StackConfig, transnormer
from tests.laws.networks import relative_error
from tests.support.parameters import drawn


def kinds(**options):
    """d for a layer of DiagAttention, n for one of NormAttention, p for both."""
    config = transnormer("t2", StackConfig, num_layers=12, **options)
    return "".join({DiagConfig: "d", NormConfig: "n"}.get(type(m), "p") for m in config.mechanisms)


def test_ablations():
    """Tables 8, 9 and 12."""
    assert kinds() == "d" * 6 + "n" * 6
    assert [kinds(early_layers=k).count("d") for k in (0, 3, 6, 9, 12)] == [0, 3, 6, 9, 12]
    assert kinds(swap_mechanisms=True) == "n" * 6 + "d" * 6
    assert kinds(schedule="alternate") == "dn" * 6
    assert kinds(schedule="alternate", swap_mechanisms=True) == "nd" * 6
    assert kinds(schedule="parallel") == "p" * 12


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
    """Table 4 counts 155.99M, which matches a GLU of 1365, 2/3 of a plain network's 2048; the table's 2048 gives
    162M."""
    size = {**TRANSNORMER_SIZES["wikitext103"], "vocab_size": 267744}
    tokens = jnp.zeros((1, 8), jnp.int32)
    narrow, wide = (
        DecoderLM(transnormer(variant, DecoderConfig, **size | d_ff)) for d_ff in ({}, {"d_ff": 2048})
    )
    assert parameters(narrow, tokens) == pytest.approx(155.99e6, abs=0.03e6)
    assert parameters(wide, tokens) == pytest.approx(162.26e6, abs=0.03e6)
    # The embedding, and for each layer attention, three matrices of the GLU, two norms and the attention's own.
    own_norms = 6 if variant == "t1" else 3
    expected = 267744 * 512 + 6 * (4 * 512**2 + 3 * 512 * 1365 + 2 * 512) + (own_norms + 1) * 512
    assert parameters(narrow, tokens) == expected


def test_lra_size_is_an_encoder():
    """Later tokens affect earlier ones, inside and outside the block; padding does not."""
    config = transnormer("t1", StackConfig, block_size=4, **TRANSNORMER_SIZES["lra"])
    stack = Stack(config.mechanisms, config.make_dimensions(is_causal=False))
    x = jax.random.normal(jax.random.key(0), (1, 14, 64))
    variables = drawn(stack.init, x)
    run = jax.jit(lambda v, x, lengths: stack.apply(v, x, lengths=lengths)[0])
    whole = run(variables, x, jnp.array([14]))
    for later in (3, 13):
        moved = run(variables, x.at[:, later].multiply(-1.0), jnp.array([14]))
        assert relative_error(moved[:, 0], whole[:, 0]) > 1e-4
    padded = run(variables, x.at[:, 9:].set(50.0), jnp.array([9]))
    alone = run(variables, x[:, :9], jnp.array([9]))
    assert relative_error(padded[:, :9], alone) < 1e-5
