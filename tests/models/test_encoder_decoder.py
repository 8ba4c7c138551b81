"""The encoder-decoder: generation equals training, padding has no effect, nothing looks ahead, the encoder learns."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import DecoderConfig, DecoderLM, EncoderDecoder, EncoderDecoderConfig, generate
from brl_jax.layers import BRLConfig, DeltaNetConfig, FullConfig, LinformerConfig, LocalConfig
from tests.laws.cases import CASES, LEADING
from tests.support.numbers import relative_error
from tests.support.parameters import drawn

SIZE = {"num_layers": 1, "encoder_layers": 1, "d_model": 16, "num_heads": 4, "d_ff": 16, "vocab_size": 11}
BRL = BRLConfig(window=4, num_compressed=3, block_size=4, history_size=8)
SOURCE = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 9)), jnp.int32)
LENGTHS = jnp.array([5, 9])
TOKENS = jnp.asarray(np.random.default_rng(1).integers(0, 11, (2, 12)), jnp.int32)
PREFIX = 3


def make(config):
    """A model, its parameters, and its compiled forward pass: (parameters, tokens, source, weight) -> logits, gradients
    of sum(logits weight)."""
    model = EncoderDecoder(config)

    def weighted(variables, tokens, source, weight):
        logits, _ = model.apply(variables, tokens, source, source_lengths=LENGTHS)
        return jnp.sum(logits * weight), logits

    def both(*arguments):
        grads, logits = jax.grad(weighted, has_aux=True)(*arguments)
        return logits, grads["params"]

    return model, drawn(model.init, TOKENS, SOURCE), jax.jit(both)


def check(config):
    model, variables, both = make(config)
    # Only the first token of a row is weighted: later tokens and the source's padding get no gradient.
    weight = np.zeros((2, 12, 11), np.float32)
    weight[:, 0] = np.random.default_rng(0).normal(size=(2, 11))
    logits, grads = both(variables, TOKENS, SOURCE, weight)
    assert np.isfinite(logits).all()
    # The source's padding has no effect, even with a token outside the vocabulary; existing tokens do.
    padded, padded_grads = both(variables, TOKENS, SOURCE.at[0, 5:].set(jnp.array([3, 1, 99, 4])), weight)
    np.testing.assert_array_equal(padded, logits)
    jax.tree.map(np.testing.assert_array_equal, padded_grads, grads)
    moved = both(variables, TOKENS, SOURCE.at[0, 1].set((SOURCE[0, 1] + 1) % 11), weight)[0]
    assert np.abs(moved[0] - logits[0]).max(axis=-1).min(initial=np.inf, where=np.arange(12) < 3) > 1e-6
    np.testing.assert_array_equal(moved[1], logits[1])
    # No token depends on a later one or on the padding of a shorter target, bitwise.
    changed = both(variables, TOKENS.at[:, 7:].set((TOKENS[:, 7:] + 1) % 11), SOURCE, weight)[0]
    np.testing.assert_array_equal(changed[:, :7], logits[:, :7])
    assert np.abs(changed[:, 7] - logits[:, 7]).max() > 1e-6
    # All of the encoder's parameters learn from the decoder, except for compressed tokens that nobody reads.
    still = [
        jax.tree_util.keystr(p) for p, g in jax.tree.leaves_with_path(grads["encoder"]) if not np.abs(g).max()
    ]
    assert all("compressed" in path and not config.cross_compressed for path in still)
    return model, variables, logits


def check_generation(model, variables, logits):
    """Several tokens at once, then one by one, with cached keys and values, give the logits of training."""

    @jax.jit
    def first(tokens, cache):
        encoded = model.apply(variables, SOURCE, LENGTHS, method="encode")
        return model.apply(variables, tokens, cache=cache, encoded=encoded)

    @jax.jit
    def rest(tokens, cache):
        def step(cache, token):
            out, cache = model.apply(variables, token[:, None], cache=cache)
            return cache, out[:, 0]

        return jnp.moveaxis(jax.lax.scan(step, cache, tokens.T)[1], 0, 1)

    start, cache = first(TOKENS[:, :PREFIX], model.init_cache(2, 12, 9))
    found = jnp.concatenate([start, rest(TOKENS[:, PREFIX:], cache)], axis=1)
    assert relative_error(found, logits) < 1e-5


@pytest.mark.slow
def test_brl_reads_a_window_and_compressed_tokens():
    """Sources of 9 tokens and targets of 12 with a window of 4: both ends of the source, and beyond it."""
    config = EncoderDecoderConfig(
        mechanism=LocalConfig(window=4), encoder_mechanism=BRL, cross_window=4, **SIZE
    )
    check_generation(*check(config))


MANY = {
    "brl": EncoderDecoderConfig(mechanism=BRL, cross_window=4, **SIZE),
    "full": EncoderDecoderConfig(mechanism=FullConfig(), num_kv_heads=2, **SIZE),
    "sinusoidal": EncoderDecoderConfig(
        mechanism=LocalConfig(window=4), positions="sinusoidal", cross_window=5, **SIZE
    ),
    "none": EncoderDecoderConfig(mechanism=FullConfig(), positions="none", **SIZE),
    "two layers": EncoderDecoderConfig(
        mechanism=BRL,
        late_mechanism=FullConfig(),
        remat="full",
        **(SIZE | {"num_layers": 3, "encoder_layers": 2}),
    ),
    "memory of outputs": EncoderDecoderConfig(
        mechanism=dataclasses.replace(BRL, memory="output"), cross_window=4, **SIZE
    ),
    "tokens alone": EncoderDecoderConfig(mechanism=BRL, cross_compressed=False, **SIZE),
    "another encoder": EncoderDecoderConfig(
        mechanism=DeltaNetConfig(chunk_size=4),
        encoder_mechanism=LinformerConfig(num_projected=4, max_length=9),
        **SIZE,
    ),
    "output norms": EncoderDecoderConfig(mechanism=FullConfig(), output_norms=True, **SIZE),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MANY)
def test_other_parts(name):
    check_generation(*check(MANY[name]))


BOTH = [
    name for name in LEADING if CASES[name].causal and CASES[name].bidirectional and CASES[name].group == 1
]


@pytest.mark.slow
@pytest.mark.parametrize("name", BOTH)
def test_every_mechanism(name):
    config = EncoderDecoderConfig(mechanism=CASES[name], **SIZE)
    model, variables, both = make(config)
    logits, _ = both(variables, TOKENS, SOURCE, np.zeros((2, 12, 11), np.float32))
    padded, _ = both(variables, TOKENS, SOURCE.at[0, 5:].set(7), np.zeros((2, 12, 11), np.float32))
    np.testing.assert_array_equal(padded, logits)
    check_generation(model, variables, logits)


@pytest.mark.slow
def test_generate_takes_the_likeliest_tokens_of_training():
    """Greedy tokens are the argmax of the teacher-forced logits; each row keeps its source."""
    model, variables, _ = make(EncoderDecoderConfig(mechanism=BRL, cross_window=4, **SIZE))
    settings = {"max_new_tokens": 8, "temperature": 0}
    run = functools.partial(generate, model, variables, **settings)
    out = np.asarray(run(np.full((2, 1), 3), source=SOURCE, source_lengths=LENGTHS))
    logits, _ = model.apply(variables, out[:, :-1], SOURCE, source_lengths=LENGTHS)
    np.testing.assert_array_equal(np.argmax(logits, axis=-1), out[:, 1:])
    alone = run(np.full((1, 1), 3), source=SOURCE[:1, :5])
    np.testing.assert_array_equal(alone, out[:1])


def test_what_is_refused():
    model = EncoderDecoder(EncoderDecoderConfig(mechanism=FullConfig(), **SIZE))
    variables = {"params": {"x": jnp.zeros(1)}}
    go = functools.partial(generate, model, variables, np.zeros((2, 1), int), max_new_tokens=2, temperature=0)
    for options, message in (
        ({}, "source must be given with EncoderDecoder, got None"),
        ({"source": np.zeros((3, 4), int)}, "source must have the prompts' 2 rows, got 3"),
        ({"source": np.full((2, 4), 11)}, r"source must hold tokens from 0 to 10, got \[11"),
        (
            {"source": SOURCE, "source_lengths": [1, 10]},
            r"source_lengths must be 2 integers from 1 to 9, got \[1, 10\]",
        ),
        ({"source": np.zeros((2, 4))}, r"source must be integers of shape \(batch, length\)"),
    ):
        with pytest.raises(ValueError, match=message):
            go(**options)
    decoder = DecoderLM(DecoderConfig(mechanism=FullConfig(), vocab_size=11))
    with pytest.raises(
        ValueError, match="source and source_lengths must be None with DecoderLM, which has no encoder"
    ):
        generate(decoder, variables, np.zeros((2, 1), int), max_new_tokens=2, temperature=0, source=SOURCE)
    for call, message in (({}, "got neither"), ({"encoded": (), "source": SOURCE}, "got both")):
        with pytest.raises(ValueError, match=f"exactly one of source and encoded .*, {message}"):
            model.init(jax.random.key(0), TOKENS, **call)
    with pytest.raises(ValueError, match="source_length of a cache must be at least 1, got 0"):
        model.init_cache(2, 4, 0)
