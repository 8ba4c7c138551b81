"""Sampling, stop tokens, streaming, and invalid calls."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import DecoderConfig, DecoderLM, LocalConfig, generate, stream
from brl_jax.sampling import sample
from tests.support.parameters import drawn

SIZES = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 16, "vocab_size": 11}
MODEL = DecoderLM(DecoderConfig(mechanism=LocalConfig(window=4), **SIZES))
PROMPTS = np.array([[1, 2, 3, 0], [4, 5, 6, 7]])
LENGTHS = np.array([3, 4])
SETTINGS = {"max_new_tokens": 6, "lengths": LENGTHS, "rng": jax.random.key(3)}


@pytest.fixture(scope="module")
def variables():
    return drawn(MODEL.init, jnp.zeros((1, 1), jnp.int32))


@pytest.fixture(scope="module")
def whole(variables):
    return np.asarray(generate(MODEL, variables, PROMPTS, **SETTINGS))


def test_a_row_ends_with_its_stop_token(variables, whole):
    # A token that one row generates early; the other row has it in the prompt, where it must not stop generation.
    stop = int(whole[0, 5])
    prompts = PROMPTS.copy()
    expected = whole.copy()
    for row, length in enumerate(LENGTHS):
        new = whole[row, length:]
        first = np.flatnonzero(new == stop)
        if first.size:
            expected[row, length + first[0] + 1 :] = 0
    out = generate(MODEL, variables, prompts, **SETTINGS, stop_tokens=[stop])
    np.testing.assert_array_equal(out, expected)
    assert not (expected == whole).all()
    # A prompt's own tokens stop nothing.
    likeliest = {"max_new_tokens": 3, "temperature": 0, "lengths": LENGTHS}
    free = np.asarray(generate(MODEL, variables, PROMPTS, **likeliest))
    others = [t for t in (4, 5, 6, 7) if t not in free[0, 3:6] and t not in free[1, 4:]]
    np.testing.assert_array_equal(generate(MODEL, variables, PROMPTS, **likeliest, stop_tokens=others), free)


@pytest.mark.parametrize("temperature", [1e-7, 1e-40, 1e-50])
def test_hardly_any_temperature_takes_the_likeliest(variables, whole, temperature):
    """The temperature is so small that dividing logits by it would overflow, or it is 0 in float32."""
    likeliest = np.asarray(generate(MODEL, variables, PROMPTS, **SETTINGS, temperature=0))
    found = generate(MODEL, variables, PROMPTS, **SETTINGS, temperature=temperature)
    np.testing.assert_array_equal(found, likeliest)
    assert (whole != likeliest).any()  # drawn at a temperature of 1


@pytest.mark.parametrize("every", [1, 4])
def test_a_stream_gives_the_columns_of_generate(variables, whole, every):
    pieces = list(stream(MODEL, variables, PROMPTS, **SETTINGS, every=every))
    assert [piece.shape[1] for piece in pieces] == ([1] * 7 if every == 1 else [4, 3])
    np.testing.assert_array_equal(np.concatenate([PROMPTS[:, :3], *pieces], axis=1), whole)


def test_a_stream_ends_when_every_row_has_ended(variables):
    stops = range(11)  # all tokens
    pieces = list(stream(MODEL, variables, PROMPTS, **SETTINGS, stop_tokens=stops))
    out = np.asarray(generate(MODEL, variables, PROMPTS, **SETTINGS, stop_tokens=stops))
    together = np.concatenate(pieces, axis=1)
    assert together.shape == (2, 2)  # the longer prompt's last token, then its first new one
    np.testing.assert_array_equal(out[:, 3:5], together)
    assert not out[:, 5:].any()
    assert together[1, 0] == PROMPTS[1, 3]
    assert together[0, 1] == 0


def likely(probabilities, **options):
    """The set of tokens in 400 draws."""
    logits = jnp.log(jnp.asarray([probabilities], jnp.float32))
    draw = jax.jit(jax.vmap(lambda key: sample(key, logits, **options)[0]))
    return set(np.asarray(draw(jax.random.split(jax.random.key(0), 400))).tolist())


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {0, 1, 2, 3}),
        ({"top_p": 0.4}, {1}),
        # Keeps the token with which the sum reaches top_p, and nothing after it.
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 0.9}, {0, 1, 3}),
        ({"top_k": 2}, {1, 3}),
        # The two most likely, renormalized to 0.625 and 0.375.
        ({"top_k": 2, "top_p": 0.6}, {1}),
        ({"top_k": 2, "top_p": 0.7}, {1, 3}),
    ],
)
def test_which_tokens_are_drawn(options, expected):
    assert likely([0.15, 0.5, 0.05, 0.3], **options) == expected


def test_top_p_that_the_first_token_reaches():
    """The sum before the second token equals top_p exactly, so it is not drawn."""
    assert jnp.cumsum(jax.nn.softmax(jnp.log(jnp.asarray([0.5, 0.25, 0.25]))))[0] == 0.5
    assert likely([0.5, 0.25, 0.25], top_p=0.5) == {0}
    assert likely([0.25, 0.5, 0.25], top_p=0.5000001) == {0, 1, 2}  # both of a tie


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"variables": {"embedding": np.ones(3)}}, r"variables must hold .* the keys \['embedding'\]"),
        ({"variables": None}, "variables must hold the model's parameters, .* got NoneType"),
        ({"prompts": [1, 2]}, r"prompts must be integers of shape .*, got int64 \(2,\)"),
        ({"lengths": [1.5]}, r"lengths must be 1 integers from 1 to 2, got \[1.5\]"),
        ({"lengths": [0]}, r"lengths must be 1 integers from 1 to 2, got \[0\]"),
        ({"stop_tokens": [11]}, r"stop_tokens must be tokens of the vocabulary \(11\), got \[11\]"),
    ],
)  # fmt: skip
def test_calls_that_cannot_be(variables, changes, message):
    call = {
        "model": MODEL, "variables": variables, "prompts": [[1, 2]], "max_new_tokens": 2, "rng": jax.random.key(0)
    }  # fmt: skip
    with pytest.raises(ValueError, match=message):
        generate(**call | changes)
    with pytest.raises(ValueError, match=message):
        stream(**call | changes)
