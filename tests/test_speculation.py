"""Speculative decoding: the tokens and their distribution are the large model's, and it is called less often."""

import collections
import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import (
    BRLConfig,
    DecoderConfig,
    DecoderLM,
    Draft,
    FullConfig,
    GatedDeltaNetConfig,
    LinearConfig,
    LocalConfig,
    TLinFormerConfig,
    generate,
)
from brl_jax.decoding import generate_drafted
from brl_jax.sampling import likely
from tests.laws.cases import CASES, LEADING
from tests.laws.networks import network
from tests.marks import slow_unless
from tests.support.parameters import drawn

SIZES = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 16, "vocab_size": 11}
PROMPTS = np.array([[1, 2, 3, 0, 0], [4, 5, 6, 7, 8]])
LENGTHS = np.array([2, 5])
MODELS = {
    "full": {"mechanism": FullConfig()},
    "local": {"mechanism": LocalConfig(window=4)},
    "linear": {"mechanism": LinearConfig()},
    "hybrid": {"mechanism": GatedDeltaNetConfig(), "late_mechanism": FullConfig(), "schedule": "alternate"},
    "brl": {"mechanism": BRLConfig(window=4, num_compressed=3, block_size=4)},
}
DECODING = [name for name in LEADING if CASES[name].decodes]


@functools.cache
def made(name, seed=0, **changes):
    model = DecoderLM(DecoderConfig(**SIZES | MODELS[name] | changes))
    return model, drawn(model.init, jnp.zeros((1, 1), jnp.int32), seed=seed)


def nearly(variables, size):
    """The variables with noise, so that the draft is often right."""
    rng = np.random.default_rng(9)
    return jax.tree.map(lambda x: x + jnp.asarray(size * rng.standard_normal(x.shape), x.dtype), variables)


def rounds(model, variables, draft, prompts, max_new_tokens, **options):
    """The tokens after the prompts, and how often the large model was called."""
    options = {"temperature": 0} | options
    tokens, number = generate_drafted(model, variables, draft, prompts, max_new_tokens, **options)
    return np.asarray(tokens[:, min(options.get("lengths", prompts.shape[1:])) :]), int(number)


@pytest.mark.parametrize("name", slow_unless(DECODING, ("full", "local-sliding", "gated_deltanet", "linear")))
def test_a_cache_keeps_the_first_tokens_and_the_outputs_are_of_all(name):
    """Every mechanism goes back, except for those that read a sequence in segments, which are refused by name."""
    net = network(name, True)
    stack, v, x = net.stack, net.variables, jnp.asarray(net.x[:, :12])
    cache = stack.init_cache(2, 12)
    if stack.mechanisms[0].segment is not None:
        with pytest.raises(ValueError, match=f"mechanism {net.mechanism.name} cannot go back: it reads"):
            stack.apply(v, x, cache=cache, kept=jnp.int32(2))
        return
    call = jax.jit(lambda x, cache, kept: stack.apply(v, x, cache=cache, kept=kept))
    expected = net.forward(v, x)
    _, cache = call(x[:, :5], cache, 3)
    y, kept = call(x[:, 3:8], cache, 2)
    np.testing.assert_allclose(y, expected[:, 3:8], rtol=1e-4, atol=1e-5)
    # Refused tokens leave no trace.
    _, other = call(x[:, 3:8].at[:, 2:].add(3.0), cache, 2)
    _, same = call(x[:, 7:12], kept, 0)
    for cache in (kept, other, same):
        y, _ = call(x[:, 5:10], cache, 1)
        np.testing.assert_allclose(y, expected[:, 5:10], rtol=1e-4, atol=1e-5)
    # Nor need they fit: three of five tokens, then two more, into a cache of four.
    small = stack.init_cache(2, 4)
    y, small = call(x[:, :5], small, 3)
    np.testing.assert_allclose(y[:, :4], expected[:, :4], rtol=1e-4, atol=1e-5)
    y, _ = call(x[:, 3:8], small, 1)
    np.testing.assert_allclose(y[:, :1], expected[:, 3:4], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_the_likeliest_tokens_are_the_same(name):
    model, variables = made(name)
    other = made("local", seed=1, num_layers=1)
    settings = {"max_new_tokens": 9, "lengths": LENGTHS, "temperature": 0}
    expected = np.asarray(generate(model, variables, PROMPTS, **settings))
    stop = int(expected[1, 9])
    stopped = generate(model, variables, PROMPTS, **settings, stop_tokens=[stop])
    for draft, stops, tokens in (
        (Draft(*other, tokens=1), [], expected),
        (Draft(model, nearly(variables, 0.02)), [stop], stopped),
    ):
        found = generate(model, variables, PROMPTS, **settings, draft=draft, stop_tokens=stops)
        np.testing.assert_array_equal(found, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in DECODING if CASES[name].segment is None])
def test_every_mechanism_that_can_go_back_generates_the_same_tokens(name):
    mechanism = CASES[name]
    sizes = SIZES | {"num_heads": 4, "num_kv_heads": 2, "num_layers": mechanism.group}
    model = DecoderLM(DecoderConfig(**sizes, mechanism=mechanism))
    variables = drawn(model.init, jnp.zeros((1, 1), jnp.int32))
    settings = {"max_new_tokens": 9, "lengths": LENGTHS, "temperature": 0}
    expected = generate(model, variables, PROMPTS, **settings)
    draft = Draft(*made("local", seed=1, num_layers=1), tokens=3)
    np.testing.assert_array_equal(generate(model, variables, PROMPTS, **settings, draft=draft), expected)


@pytest.mark.slow
@pytest.mark.parametrize("wide", [False, True])
def test_a_continuation_is_shorter_than_a_draft(wide):
    model, variables = made("full")
    draft = Draft(*made("local", seed=1, num_layers=1), tokens=4)
    settings = {"max_new_tokens": 2, "temperature": 0}
    with jax.enable_x64(wide), jax.numpy_dtype_promotion("standard"):
        expected = generate(model, variables, [[3]], **settings)
        np.testing.assert_array_equal(generate(model, variables, [[3]], **settings, draft=draft), expected)


@pytest.mark.slow
def test_the_large_model_is_called_once_for_several_tokens():
    model, variables = made("hybrid")
    prompts, new = PROMPTS[1:], 40
    calls = {}
    expected = generate(model, variables, prompts, max_new_tokens=new, temperature=0)
    for noise in (0.0, 0.02, 1.0):
        draft = Draft(model, nearly(variables, noise), tokens=4)
        tokens, calls[noise] = rounds(model, variables, draft, prompts, new)
        np.testing.assert_array_equal(tokens, np.asarray(expected)[:, 5:])
    assert calls[0.0] == new // 5  # a draft that is always right: four drafted tokens and one more
    assert calls[0.0] <= calls[0.02] <= new // 2
    assert calls[0.02] < calls[1.0] <= new


@pytest.mark.parametrize("options", [{}, {"temperature": 0.7, "top_k": 4, "top_p": 0.9}])
def test_sampled_tokens_have_the_exact_distribution(options):
    """All continuations of three tokens from five, 4,096 times: their counts fit the large model's probabilities, and
    do not fit the draft's."""
    small = {"num_layers": 1, "vocab_size": 5}
    model, draft = (made(name, **small)[0] for name in ("linear", "local"))
    variables, draft_variables = (
        jax.tree.map(lambda x: 2 * x, nn.unbox(jax.jit(each.init)(jax.random.key(seed), PROMPTS[:, :1])))
        for seed, each in enumerate((model, draft))
    )
    batch, prompt = 4096, [1, 2]
    texts = np.array(list(itertools.product(range(5), repeat=3)))

    def probabilities(model, variables):
        tokens = np.concatenate([np.tile(prompt, (len(texts), 1)), texts], axis=1)
        logits, _ = jax.jit(model.apply)(variables, jnp.asarray(tokens))
        cut = {name: options.get(name) for name in ("top_k", "top_p")}
        each = jax.nn.softmax(likely(logits[:, 1:4] / options.get("temperature", 1.0), **cut))
        return np.asarray(np.take_along_axis(np.asarray(each, np.float64), texts[..., None], 2).prod((1, 2)))

    def misfit(found, expected):
        """Pearson's statistic and its degrees of freedom; rare continuations share a cell."""
        rare = expected * batch < 5
        observed = np.array([found[tuple(text)] for text in texts.tolist()], float)
        cells = [(observed[~rare], expected[~rare] * batch)]
        if expected[rare].sum() * batch > 1e-6:
            cells.append((observed[rare].sum(keepdims=True), expected[rare].sum(keepdims=True) * batch))
        else:
            assert observed[rare].sum() == 0
        o, e = (np.concatenate(x) for x in zip(*cells))
        return ((o - e) ** 2 / e).sum(), len(o) - 1

    exact, other = probabilities(model, variables), probabilities(draft, draft_variables)
    np.testing.assert_allclose([exact.sum(), other.sum()], 1, rtol=1e-5)
    prompts = np.tile(prompt, (batch, 1))
    out = generate(
        model, variables, prompts, max_new_tokens=3, rng=jax.random.key(5), **options,
        draft=Draft(draft, draft_variables, tokens=2),
    )  # fmt: skip
    found = collections.Counter(map(tuple, np.asarray(out)[:, 2:].tolist()))
    value, freedom = misfit(found, exact)
    bound = freedom + 4 * np.sqrt(2 * freedom)  # beyond four standard deviations
    assert value < bound
    if not options:
        assert misfit(found, other)[0] > 3 * bound


def test_bad_input():
    model, variables = made("full")
    settings = {"max_new_tokens": 2, "temperature": 0}
    run = functools.partial(generate, model, variables, PROMPTS, **settings)
    with pytest.raises(ValueError, match="draft must be of type Draft, got tuple"):
        run(draft=(model, variables))
    for number in (0, True):
        with pytest.raises(
            ValueError, match=rf"draft\.tokens must be an integer of at least 1, got {number}"
        ):
            run(draft=Draft(model, variables, tokens=number))
    with pytest.raises(ValueError, match=r"draft\.model must have the model's 11 tokens, got 7"):
        run(draft=Draft(*made("local", vocab_size=7)))
    for mechanism in (BRLConfig(memory="output", block_size=4), TLinFormerConfig(window=4)):
        config = DecoderConfig(**SIZES | {"num_layers": 4, "mechanism": mechanism})
        with pytest.raises(ValueError, match=f"mechanism {mechanism.name} cannot go back"):
            run(draft=Draft(DecoderLM(config), variables))
    with pytest.raises(ValueError, match="kept needs a decoding cache"):
        model.apply(variables, jnp.asarray(PROMPTS), kept=1)
