"""TLinFormer as a network: agreement with a plain decoder, what its outputs depend on, and its cache size."""

import dataclasses
import functools
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.decoding import generate
from brl_jax.layers import FullConfig, TLinFormerConfig
from brl_jax.models import DecoderConfig, DecoderLM, make_stack
from tests.laws.cases import dimensions
from tests.marks import slow_unless
from tests.support.numbers import relative_error
from tests.support.parameters import drawn
from tests.support.programs import optimised
from train.tasks.lm_config import PRESETS

SMALL = TLinFormerConfig(window=4, context=3, hidden=1)
LENGTH = 15


def config(mechanism=SMALL, **changes):
    sizes = {"num_layers": 6, "d_model": 16, "num_heads": 2, "d_ff": 24, "vocab_size": 11, "ffn": "swiglu"}
    return DecoderConfig(mechanism=mechanism, **sizes | changes)


@pytest.fixture(scope="module")
def variables():
    """Parameters of a plain decoder."""
    model = DecoderLM(config(FullConfig(), use_bias=True, ffn_bias=False))
    return drawn(model.init, jnp.zeros((1, 1), jnp.int32))


def decoder(mechanism=SMALL, **changes):
    return DecoderLM(config(mechanism, use_bias=True, ffn_bias=False, **changes))


def tokens(length=LENGTH, batch=2):
    return jnp.asarray(np.random.default_rng(1).integers(0, 11, (batch, length)), jnp.int32)


def test_parameters_are_a_plain_decoders(variables):
    shapes = jax.eval_shape(decoder().init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
    assert jax.tree.map(lambda a: a.shape, nn.unbox(shapes)) == jax.tree.map(lambda a: a.shape, variables)


@pytest.mark.slow
def test_one_window_over_everything_is_the_plain_decoder(variables):
    plain, whole = decoder(FullConfig()), decoder(dataclasses.replace(SMALL, window=LENGTH))
    expected = jax.jit(plain.apply)(variables, tokens())[0]
    np.testing.assert_array_equal(jax.jit(whole.apply)(variables, tokens())[0], expected)
    # The first of several windows also uses the windowed pass, with an empty history.
    several = jax.jit(decoder(dataclasses.replace(SMALL, window=8)).apply)(variables, tokens())[0]
    assert relative_error(several[:, :8], expected[:, :8]) < 1e-5
    assert relative_error(several[:, 8:], expected[:, 8:]) > 1e-2


@pytest.mark.slow
def test_every_output_depends_on_every_earlier_token_and_on_no_later_one():
    mechanism = dataclasses.replace(SMALL, context=6)  # more than a window
    stack = make_stack((mechanism,) * 6, dimensions(True))
    x = jax.random.normal(jax.random.key(1), (1, LENGTH, 16), jnp.float32)
    params = drawn(stack.init, x)
    jacobian = jax.jit(jax.jacrev(lambda x: stack.apply(params, x)[0][0]))(x)[:, :, 0]
    influence = np.abs(np.asarray(jacobian)).max(axis=(1, 3))
    lower = np.tri(LENGTH, dtype=bool)
    assert (influence[lower] > 1e-7).all()
    np.testing.assert_array_equal(influence[~lower], 0)


@pytest.mark.slow
def test_a_cache_takes_tokens_and_absorbed_windows_in_any_pieces(variables):
    model, text = decoder(), tokens(LENGTH)
    expected = jax.jit(model.apply)(variables, text)[0]
    absorb = jax.jit(lambda text, cache: model.apply(variables, text, cache, method="absorb"))
    step = jax.jit(lambda text, cache: model.apply(variables, text, cache=cache))
    cache = model.init_cache(2, LENGTH)
    for start in (0, 4):
        cache = absorb(text[:, start : start + 4], cache)
    outputs = []
    for start in range(8, 15):
        logits, cache = step(text[:, start : start + 1], cache)
        outputs.append(logits)
    assert relative_error(jnp.concatenate(outputs, axis=1), expected[:, 8:]) < 1e-4


def test_only_whole_windows_before_the_last_token_are_absorbed():
    stack = make_stack((SMALL,) * 3, dimensions(True))
    assert [stack.absorbable(length) for length in (1, 4, 5, 8, 9)] == [0, 0, 4, 4, 8]


def cache_bytes(model, length):
    return sum(
        a.size * a.dtype.itemsize
        for a in jax.tree.leaves(jax.eval_shape(lambda: model.init_cache(1, length)))
    )


def test_cache_bytes_of_a_token():
    """1 / (H + 2) of the plain decoder's, plus the token itself."""
    per_token = [
        (cache_bytes(decoder(m), 2048) - cache_bytes(decoder(m), 1024)) / 1024 for m in (SMALL, FullConfig())
    ]
    assert per_token[0] == per_token[1] / (SMALL.hidden + 2) + 4


def temporary_bytes(function, *args, donated=()):
    compiled = optimised(jax.jit(function, donate_argnums=donated).lower(*args))
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
@pytest.mark.parametrize("context", [32, 64])
def test_a_step_copies_nothing_as_long_as_the_text(context):
    model = decoder(dataclasses.replace(SMALL, window=64, context=context))
    variables = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))

    def step(variables, token, cache):
        return model.apply(variables, token, cache=cache)

    sizes = []
    for length in (2**14, 2**15):
        cache = jax.eval_shape(lambda length=length: model.init_cache(1, length))
        sizes.append(temporary_bytes(step, variables, tokens(1, 1), cache, donated=(2,)))
    scores = 2 * 4  # the bytes of one query's scores per token, over all heads
    assert sizes[1] - sizes[0] <= 1.1 * scores * 2**14


@pytest.mark.slow
def test_training_memory_is_linear():
    model = decoder(TLinFormerConfig(window=256, context=64, hidden=0), num_layers=4)
    variables = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32)))

    def gradient(variables, text):
        return jax.grad(lambda v: model.apply(v, text, text, method="loss")[0])(variables)

    sizes = [
        temporary_bytes(gradient, variables, jax.ShapeDtypeStruct((1, length), jnp.int32))
        for length in (2**13, 2**14)
    ]
    assert sizes[1] <= 2.2 * sizes[0]


@pytest.mark.slow
def test_dropout_is_fresh_and_reaches_every_window(variables):
    model = decoder(dropout=0.5)
    run = jax.jit(lambda key: model.apply(variables, tokens(), deterministic=False, rngs={"dropout": key})[0])
    one, again, other = (run(jax.random.key(i)) for i in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert (np.abs(one - other).max(axis=(0, 2)) > 1e-3).all()


def test_the_papers_network_has_41m_parameters():
    sizes = []
    for name in ("wikitext103-tlinformer-1k-512-0.5", "wikitext103-tlinformer-base-1k"):
        model = DecoderLM(dataclasses.replace(PRESETS[name].model, vocab_size=50257))
        shapes = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 1), jnp.int32))
        sizes.append(sum(a.size for a in jax.tree.leaves(shapes)))
    assert sizes[0] == sizes[1]
    assert round(sizes[0] / 1e6) == 41


def test_more_tokens_than_a_cache_holds_are_refused(variables):
    model = decoder()
    cache = model.init_cache(2, 4)
    message = "cache: has room for 4 tokens, got 5 after 0; init_cache.batch, length. with a larger length"
    with pytest.raises(ValueError, match=message):
        model.apply(variables, tokens(5), cache=cache)
    with pytest.raises(ValueError, match="got 2 after 3"):
        model.apply(variables, tokens(2), cache=cache._replace(length=jnp.int32(3)))
    with pytest.raises(ValueError, match="positions must be None with a cache of TLinFormer"):
        model.apply(variables, tokens(1), cache=cache, positions=jnp.array([[0]]))


def test_dropout_with_a_cache_is_refused(variables):
    """It used to be ignored. A network without dropout accepts the argument."""
    for rate in (0.0, 0.5):
        model = decoder(dropout=rate)
        call = functools.partial(model.apply, variables, tokens(2), cache=model.init_cache(2, LENGTH))
        if rate:
            with pytest.raises(ValueError, match="deterministic must be True with a cache of TLinFormer"):
                call(deterministic=False, rngs={"dropout": jax.random.key(0)})
        else:
            programs = (
                jax.make_jaxpr(functools.partial(call, **options))()
                for options in ({"deterministic": False}, {})
            )
            assert len({re.sub(r"0x\w+", "", str(program)) for program in programs}) == 1


def test_auto_context_grows_with_the_history():
    sizes = TLinFormerConfig(window=256, context="auto").context_sizes(5)
    np.testing.assert_array_equal(sizes, [0, 72, 80, 80, 88])  # 12 ln(256) = 66.5, 74.9, 79.7, 83.2
    assert TLinFormerConfig(window=8, context="auto").context_sizes(2)[1] == 8  # never more than there is


@pytest.mark.parametrize("capacity", slow_unless([3, 4], (4,)))
def test_generation_within_one_window_needs_no_history(capacity):
    """Prompt and new tokens fit in one window, whose history stays empty."""
    model = decoder()
    variables = drawn(model.init, jnp.zeros((1, 1), jnp.int32))
    out = generate(model, variables, tokens(2), max_new_tokens=capacity - 2, temperature=0)
    logits = jax.jit(model.apply)(variables, out)[0]
    np.testing.assert_array_equal(out[:, 2:], jnp.argmax(logits[:, 1:-1], axis=-1))
