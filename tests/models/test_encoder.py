"""Encoders that classify: padding has no effect, poolings and positions match their definitions, pairs see both
texts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import BRLConfig, FullConfig, LocalConfig
from brl_jax.models import (
    Classifier,
    Encoder,
    EncoderConfig,
    EncoderDecoderConfig,
    GraphConfig,
    MaskedLM,
    PairClassifier,
    RegressorConfig,
    TokenClassifier,
    transnormer,
)
from brl_jax.models.inputs import sinusoidal_positions
from tests.laws.cases import CASES, LEADING
from tests.oracles.parts import classified
from tests.support.numbers import as_float64, relative_error
from tests.support.parameters import drawn

SIZE = {"num_layers": 1, "d_model": 16, "num_heads": 4, "d_ff": 24, "vocab_size": 11, "max_length": 16}
# One case of each listed mechanism; max_length of Linformer and cosFormer leaves space for a token in front.
BIDIRECTIONAL = {name: CASES[name] for name in LEADING if CASES[name].bidirectional}
TOKENS = jnp.asarray(np.random.default_rng(2).integers(0, 11, (2, 14)), jnp.int32)
LENGTHS = jnp.array([9, 14])


def make(config, kind=Classifier, tokens=TOKENS):
    """A model's parameters and its compiled call."""
    model = kind(config)
    return drawn(model.init, tokens), jax.jit(
        lambda v, tokens, lengths: model.apply(v, tokens, lengths=lengths)
    )


def check_padding(config):
    variables, run = make(config)
    padded = run(variables, TOKENS, LENGTHS)
    # Other tokens in the padding, even one (NaN) outside the vocabulary, give bitwise the same.
    other = TOKENS.at[0, 9:].set(jnp.array([3, 1, 4, 1, 99]))
    np.testing.assert_array_equal(run(variables, other, LENGTHS), padded)
    alone = run(variables, TOKENS[:1, :9], LENGTHS[:1])
    tolerance = 1e-5 if config.dtype == "float32" else 2e-2
    assert relative_error(padded[0], alone[0]) < tolerance
    # Existing tokens do matter.
    assert relative_error(run(variables, other, jnp.array([12, 14]))[0], padded[0]) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", BIDIRECTIONAL)
def test_padding_never_changes_an_answer(name):
    check_padding(EncoderConfig(mechanism=BIDIRECTIONAL[name], **SIZE))


def test_padding_never_changes_an_answer_of_transnormer():
    check_padding(transnormer("t2", EncoderConfig, block_size=4, **(SIZE | {"num_layers": 2})))


@pytest.mark.parametrize(
    "changes",
    [
        {"pooling": "max", "inputs": "scale", "positions": "learned"},
        pytest.param({"pooling": "cls", "positions": "sinusoidal"}, marks=pytest.mark.slow),
        {"pooling": "cls", "positions": "learned", "dtype": "bfloat16"},
    ],
    ids=lambda changes: "-".join(changes.values()),
)
def test_padding_never_changes_an_answer_of_other_parts(changes):
    with jax.numpy_dtype_promotion("standard"):  # flax's norms promote bfloat16 themselves
        check_padding(EncoderConfig(mechanism=LocalConfig(window=28), **SIZE, **changes))


@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal"])
def test_order_counts_by_the_positions_alone(positions):
    config = EncoderConfig(mechanism=FullConfig(), positions=positions, **SIZE)
    variables, run = make(config)
    there, back = (run(variables, tokens, LENGTHS[1:]) for tokens in (TOKENS[:1], TOKENS[:1, ::-1]))
    assert relative_error(there, back) > 1e-3
    if positions == "rope":
        variables, run = make(dataclasses.replace(config, rope_theta=None))
        there, back = (run(variables, tokens, LENGTHS[1:]) for tokens in (TOKENS[:1], TOKENS[:1, ::-1]))
        assert relative_error(there, back) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("positions", ["rope", "learned", "sinusoidal"])
def test_packed_sequences_have_the_answers_they_have_alone(positions):
    """All kinds of positions, padded rows, and the positions that a masked language model predicts."""
    config = EncoderConfig(mechanism=FullConfig(), positions=positions, **SIZE)
    variables, _ = make(config, TokenClassifier)
    model = TokenClassifier(config)
    run = jax.jit(lambda tokens, **options: model.apply(variables, tokens, **options))
    ids = jnp.array([[4] * 5 + [1] * 9, [0] * 3 + [2] * 11], jnp.int32)
    together = run(TOKENS, segment_ids=ids, lengths=jnp.array([14, 10]))
    for row, start, stop in ((0, 0, 5), (0, 5, 14), (1, 0, 3), (1, 3, 10)):
        alone = run(
            jnp.pad(TOKENS[row : row + 1, start:stop], ((0, 0), (0, 9 - stop + start))),
            lengths=jnp.array([stop - start]),
        )
        assert relative_error(together[row, start:stop], alone[0, : stop - start]) < 1e-5
    assert relative_error(run(TOKENS)[0], together[0]) > 1e-3

    masked = MaskedLM(config)
    weights = drawn(masked.init, TOKENS, TOKENS[:, :1], seed=1)
    ask = jax.jit(lambda tokens, places, **options: masked.apply(weights, tokens, places, **options))
    logits = ask(TOKENS, jnp.array([[2, 7], [4, 5]]), segment_ids=ids)
    assert relative_error(logits[0, 1], ask(TOKENS[:1, 5:], jnp.array([[2]]))[0, 0]) < 1e-5


def test_sinusoidal_positions_are_the_formula():
    expected = np.zeros((5, 7))
    for t in range(5):
        for i in range(7):
            angle = t / 10000 ** (2 * (i // 2) / 7)
            expected[t, i] = np.cos(angle) if i % 2 else np.sin(angle)
    np.testing.assert_allclose(sinusoidal_positions(jnp.arange(5), 7), expected, atol=1e-6)


def test_a_pair_is_two_texts_through_one_encoder():
    config = EncoderConfig(mechanism=LocalConfig(window=4), num_classes=3, **SIZE)
    tokens, lengths = TOKENS.reshape(1, 2, 14), LENGTHS.reshape(1, 2)
    variables, run = make(config, PairClassifier, tokens)
    logits = run(variables, tokens, lengths)
    assert logits.shape == (1, 3)
    encoder = Classifier(config)
    encode = jax.jit(
        lambda v, tokens, n: encoder.apply(v, tokens, lengths=n, method=lambda m, *a, **k: m.encoder(*a, **k))
    )
    a, b = (encode(variables, tokens[0], lengths[0])[i : i + 1] for i in range(2))
    expected = classified(
        np.concatenate([a, b, a * b, a - b], axis=-1), as_float64(variables["params"]["head"])
    )
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)
    garbage = tokens.at[0, 0, 9:].set(7)
    np.testing.assert_array_equal(run(variables, garbage, lengths), logits)


def test_every_token_has_a_class():
    config = EncoderConfig(mechanism=LocalConfig(window=4), num_classes=3, **SIZE)
    variables, run = make(config, TokenClassifier)
    logits = run(variables, TOKENS, LENGTHS)
    assert logits.shape == (*TOKENS.shape, 3)
    encoder = Encoder(config)
    own = {"params": variables["params"]["encoder"]}
    outputs = jax.jit(lambda v: encoder.apply(v, TOKENS, lengths=LENGTHS))(own)
    expected = classified(np.asarray(outputs), as_float64(variables["params"]["head"]))
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-5)


def test_dropout_and_types():
    config = EncoderConfig(mechanism=LocalConfig(window=4), dropout=0.5, dtype="bfloat16", **SIZE)
    model = Classifier(config)
    with jax.numpy_dtype_promotion("standard"):
        variables, run = make(config)
        whole = run(variables, TOKENS, LENGTHS)
        rngs = {"dropout": jax.random.key(2)}
        dropped = jax.jit(lambda v: model.apply(v, TOKENS, lengths=LENGTHS, deterministic=False, rngs=rngs))(
            variables
        )
    assert whole.dtype == jnp.float32
    assert {leaf.dtype for leaf in jax.tree.leaves(variables)} == {jnp.dtype(jnp.float32)}
    assert relative_error(dropped, whole) > 1e-2


def test_without_compressed_tokens_brl_is_local_attention():
    names = ("num_compressed", "window", "pattern")
    brl = BRLConfig(**dict(zip(names, (0, 4, "dilated"))))
    outputs = [
        run(variables, TOKENS, LENGTHS)
        for variables, run in (
            make(EncoderConfig(mechanism=mechanism, **SIZE))
            for mechanism in (brl, LocalConfig(window=4, pattern="dilated"))
        )
    ]
    np.testing.assert_array_equal(*outputs)
    assert brl.segment is None
    with pytest.raises(ValueError, match="num_compressed must be 0 to 256, got -1"):
        BRLConfig(num_compressed=-1)


@pytest.mark.parametrize(
    "config",
    [
        EncoderConfig(positions="learned", mechanism=BRLConfig(), **SIZE | {"d_model": 12}),
        RegressorConfig(positions="none", d_model=12, num_heads=4, mechanism=FullConfig()),
        GraphConfig(d_model=12, num_heads=4, mechanism=FullConfig()),
        EncoderDecoderConfig(positions="sinusoidal", d_model=12, num_heads=4, mechanism=FullConfig()),
    ],
    ids=lambda config: type(config).__name__,
)
def test_heads_may_be_odd_where_nothing_is_rotated(config):
    assert config.dimensions.rope_theta is None
    assert config.dimensions.head_dim == 3
    if isinstance(config, EncoderConfig):
        tokens = jnp.zeros((1, 4), jnp.int32)
        assert jax.jit(Classifier(config).init_with_output)(jax.random.key(0), tokens)[0].shape == (1, 2)
    if isinstance(config, EncoderDecoderConfig):
        assert config.encoder_dimensions.rope_theta is None
