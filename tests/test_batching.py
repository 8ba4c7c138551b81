"""Requests of any lengths share a batch; each gets the same as alone, whatever the others do."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import (
    BRLConfig,
    BSBRConfig,
    DecoderConfig,
    DecoderLM,
    EncoderDecoder,
    EncoderDecoderConfig,
    FullConfig,
    GatedDeltaNetConfig,
    LocalConfig,
    MLRConfig,
    NativeSparseConfig,
    ReformerConfig,
    Request,
    TLinFormerConfig,
    generate,
    generate_requests,
)
from tests.support.parameters import drawn

VOCABULARY = 11
STOP = 4
# More requests than slots. The first ends before the second, which outlasts the ones that reuse the first's slot.
LENGTHS = [(3, 6), (7, 20), (1, 5), (12, 7), (5, 1), (2, 11)]
SIZES = {"d_model": 16, "num_heads": 2, "d_ff": 16, "vocab_size": VOCABULARY}


@functools.cache
def network(mechanism):
    model = DecoderLM(DecoderConfig(mechanism=mechanism, num_layers=mechanism.group, **SIZES))
    variables = drawn(model.init, jnp.zeros((1, 1), jnp.int32))
    # Larger weights, so that the likeliest token changes between positions.
    return model, jax.tree.map(lambda a: 2 * a, variables)


def requests():
    rng = np.random.default_rng(1)
    return [Request(rng.integers(0, VOCABULARY, n), most, i) for i, (n, most) in enumerate(LENGTHS)]


def alone(model, variables, given):
    """The tokens that `generate` adds to each request's prompt, up to its stop token."""
    for request in given:
        prompt = np.asarray(request.prompt)[None]
        options = {"max_new_tokens": request.max_tokens, "temperature": 0, "stop_tokens": [STOP]}
        yield until_stop(np.asarray(generate(model, variables, prompt, **options))[0, prompt.shape[1] :])


def in_rows(model, variables, given):
    """The same in rows of one call, which compiles faster."""
    lengths = np.array([len(request.prompt) for request in given])
    prompts = np.array([np.pad(request.prompt, (0, max(lengths) - len(request.prompt))) for request in given])
    most = max(request.max_tokens for request in given)
    rows = np.asarray(
        generate(model, variables, prompts, lengths=lengths, max_new_tokens=most, temperature=0)
    )
    for request, row in zip(given, rows):
        yield until_stop(row[len(request.prompt) :][: request.max_tokens])


def until_stop(new):
    stops = np.flatnonzero(new == STOP)
    return new[: stops[0] + 1] if stops.size else new


CASES = {
    "local": LocalConfig(window=4),
    "full": FullConfig(),
    "brl": BRLConfig(window=5, num_compressed=3, block_size=8, history_size=None),
    "brl-output": BRLConfig(window=5, num_compressed=3, block_size=8, history_size=None, memory="output"),
    "bsbr": BSBRConfig(chunk_size=4),
    "gated_deltanet": GatedDeltaNetConfig(),
    "mlr": MLRConfig(context=32),
    "native_sparse": NativeSparseConfig(
        window=4, compressed_size=4, stride=2, selected_size=4, num_selected=3
    ),
    "reformer": ReformerConfig(num_buckets=4, chunk_size=4),
    "tlinformer": TLinFormerConfig(8, 4, 1),
}


@pytest.mark.parametrize(
    "name", [name if name == "local" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_request_gets_what_it_gets_alone(name):
    model, variables = network(CASES[name])
    given = requests()
    options = {"slots": 2, "temperature": 0, "stop_tokens": [STOP], "every": 3}
    found = list(generate_requests(model, variables, given, **options))
    assert sorted(completion.request.id for completion in found) == list(range(len(given)))
    if name == "local":
        assert [completion.request.id for completion in found] != list(range(len(given)))
    expected = list((in_rows if name == "local" else alone)(model, variables, given))
    for request, tokens, reason in found:
        np.testing.assert_array_equal(tokens, expected[request.id])
        assert reason == ("stop" if tokens[-1] == STOP else "length")
        assert reason == "stop" or len(tokens) == request.max_tokens
    if name == "local":
        assert {reason for *_, reason in found} == {"stop", "length"}


@pytest.mark.slow
def test_a_sample_depends_on_the_request_alone():
    model, variables = network(CASES["local"])
    given = requests()

    def drawn(slots, **options):
        found = generate_requests(
            model, variables, options.pop("given", given), slots=slots, rng=jax.random.key(5), **options
        )
        return {completion.request.id: completion.tokens.tolist() for completion in found}

    one = drawn(1, length=40)
    assert drawn(4, length=40, every=5) == one
    assert drawn(1, length=40, given=given[2:], numbers=[2, 3, 4, 5]) == {i: one[i] for i in range(2, 6)}
    assert drawn(1, length=40, given=given[2:]) != {i: one[i] for i in range(2, 6)}


@pytest.mark.slow
def test_requests_are_read_as_slots_become_free():
    model, variables = network(CASES["local"])
    read = []

    def lazily():
        for request in requests():
            read.append(request.id)
            yield request

    completions = generate_requests(model, variables, lazily(), slots=2, temperature=0, length=40)
    assert read == []
    next(completions)
    assert read == [0, 1]
    assert list(generate_requests(model, variables, [], temperature=0)) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": 1.0}, "rng is needed to sample"),
        ({"requests": [Request([1], 0)]}, r"requests\[0\].max_tokens must be .* at least 1, got 0"),
        ({"requests": [Request([1], 1), Request([], 1)]}, r"requests\[1\].prompt must be integers .* not empty"),
        ({"requests": [Request([11], 1)]}, r"requests\[0\].prompt must hold tokens from 0 to 10, got \[11\]"),
        ({"requests": [[1, 2]]}, r"requests\[0\] must be a Request, got list"),
        ({"requests": [None], "length": 4}, r"requests\[0\] must be a Request, got NoneType"),
        ({"requests": [Request([[1, 2]], 1)]}, r"requests\[0\].prompt must be .* got shape \(1, 2\)"),
        ({"numbers": [5, 6]}, "numbers must be one for each request"),
        ({"numbers": []}, "numbers must be one for each request"),
        ({"length": 4}, r"requests\[0\] must fit into length=4 tokens, got a prompt of 3 and 2 more"),
        ({"model": EncoderDecoder(EncoderDecoderConfig(**SIZES))},
         "model must be a decoder without an encoder, got EncoderDecoder"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be(changes, message):
    model, variables = network(CASES["local"])
    call = {"model": model, "variables": variables, "requests": [Request([1, 2, 3], 2)], "temperature": 0}
    with pytest.raises(ValueError, match=message):
        list(generate_requests(**call | changes))
