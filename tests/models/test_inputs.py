"""Network inputs: tokens, features, sets, positions, dropout, and what is refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import (
    BRLConfig,
    Classifier,
    DecoderConfig,
    DecoderLM,
    Encoder,
    EncoderConfig,
    FullConfig,
    MaskedLM,
    PairClassifier,
    Regressor,
    RegressorConfig,
)
from brl_jax.models.losses import cross_entropy
from pallas_kernels.absent import existing
from tests.marks import slow_unless
from tests.oracles.parts import classified
from tests.support.numbers import as_float64, relative_error
from tests.support.parameters import drawn

SIZE = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 24, "mechanism": FullConfig()}
TOKENS = jnp.asarray(np.random.default_rng(0).integers(0, 11, (2, 6)), jnp.int32)
VECTORS = jnp.asarray(np.random.default_rng(1).standard_normal((2, 6, 3)), jnp.float32)


def encoder_config(**changes):
    return EncoderConfig(**SIZE | {"vocab_size": 11, "max_length": 8} | changes)


def test_an_encoder_gives_token_outputs_that_classifiers_pool():
    config = encoder_config()
    encoder, classifier = Encoder(config), Classifier(config)
    variables = drawn(classifier.init, TOKENS)
    lengths = jnp.array([4, 6])
    own = {"params": variables["params"]["encoder"]}
    outputs = jax.jit(encoder.apply)(own, TOKENS, lengths=lengths)
    assert outputs.shape == (2, 6, 16)
    pooled = jnp.stack([outputs[0, :4].mean(axis=0), outputs[1].mean(axis=0)])
    expected = classified(as_float64(pooled), as_float64(variables["params"]["head"]))
    got = jax.jit(classifier.apply)(variables, TOKENS, lengths=lengths)
    assert relative_error(got, expected) < 1e-5


def test_a_prefix_stands_in_front():
    encoder = Encoder(encoder_config(positions="none"))
    variables = drawn(encoder.init, TOKENS)
    rows = encoder.apply(variables, TOKENS, method=lambda m, t: m.inputs(t))
    outputs = encoder.apply(variables, TOKENS[:, 2:], prefix=rows[:, :2], lengths=jnp.array([2, 4]))
    alone = encoder.apply(variables, TOKENS, lengths=jnp.array([4, 6]))
    assert relative_error(outputs[0, :4], alone[0, :4]) < 1e-6
    assert relative_error(outputs[1], alone[1]) < 1e-6


# With a window of one token, only BRL's compressed tokens mix tokens, and they ignore order.
SETS = {
    "mean": {},
    "max": {"pooling": "max"},
    "cls": {"pooling": "cls"},
    "brl": {"mechanism": BRLConfig(window=1, num_compressed=3)},
}


@pytest.mark.parametrize("kind", slow_unless(SETS, ("mean", "brl")))
def test_a_set_of_vectors_has_no_order(kind):
    options = SETS[kind]
    config = encoder_config(inputs="features", num_features=3, positions="none", **options)
    order, lengths = jnp.array([3, 0, 2, 1, 4, 5]), jnp.array([4, 6])
    model = Classifier(config)
    variables = drawn(model.init, VECTORS)
    run = jax.jit(lambda v: model.apply(variables, v, lengths=lengths))
    logits = run(VECTORS)
    assert relative_error(run(VECTORS[:, order]), logits) < 1e-5
    assert relative_error(run(-VECTORS), logits) > 1e-3
    # Token outputs move with the vectors, padding has no effect, and positions would matter.
    own = {"params": variables["params"]["encoder"]}
    encode = jax.jit(lambda v: Encoder(config).apply(own, v, lengths=lengths))
    outputs, moved = encode(VECTORS), encode(VECTORS[:, order])
    assert relative_error(moved[1], outputs[1, order]) < 1e-5
    padded = VECTORS.at[0, 4:].set(jnp.nan)
    np.testing.assert_array_equal(run(padded), logits)
    placed = Classifier(encoder_config(inputs="features", num_features=3, **options))
    run = jax.jit(lambda v: placed.apply(variables, v, lengths=lengths))
    there, back = run(VECTORS), run(VECTORS[:, order])
    assert relative_error(back, there) > 1e-4


@pytest.mark.parametrize("network", ["classifier", "regressor"])
def test_padded_vectors_that_are_nan_reach_no_gradient(network):
    """NaN often marks missing values. A weight's gradient is a product with the input, and 0 times NaN is NaN."""
    if network == "classifier":
        model = Classifier(encoder_config(inputs="features", num_features=3))
    else:
        model = Regressor(RegressorConfig(num_inputs=3, is_causal=False, **SIZE))
    lengths = jnp.array([4, 6])
    variables = drawn(model.init, VECTORS)

    def loss(variables, vectors):
        out = model.apply(variables, vectors, lengths=lengths)
        return jnp.sum(jnp.sin(out[:, :4] + 1))

    gradient = jax.jit(jax.grad(loss))
    zeros, nans = (gradient(variables, VECTORS.at[0, 4:].set(x)) for x in (0.0, jnp.nan))
    jax.tree.map(np.testing.assert_array_equal, nans, zeros)


def test_pairs_of_sets():
    config = encoder_config(inputs="features", num_features=3)
    model, pairs = PairClassifier(config), VECTORS.reshape(1, 2, 6, 3)
    variables = drawn(model.init, pairs)
    assert model.apply(variables, pairs, lengths=jnp.array([[2, 5]])).shape == (1, 2)
    with pytest.raises(ValueError, match=r"inputs must have shape \(batch, 2, length, features\)"):
        model.apply(variables, VECTORS)


NETWORKS = {
    "decoder": (DecoderLM(DecoderConfig(vocab_size=11, dropout=0.5, **SIZE)), TOKENS),
    "encoder": (Encoder(encoder_config(dropout=0.5)), TOKENS),
    "features": (Encoder(encoder_config(dropout=0.5, inputs="features", num_features=3)), VECTORS),
    "regressor": (Regressor(RegressorConfig(num_inputs=3, dropout=0.5, **SIZE)), VECTORS),
}


@pytest.mark.parametrize("name", slow_unless(NETWORKS, ("decoder",)))
def test_dropout_reaches_the_embedding(name):
    """Outputs change even though sublayers add nothing and their dropout has no effect."""
    model, inputs = NETWORKS[name]
    params = drawn(model.init, inputs)["params"]
    block = params["stack"]["layers_0"]["block_0"]
    silent = {
        "mixer": {**block["mixer"], "out": jax.tree.map(jnp.zeros_like, block["mixer"]["out"])},
        "feed_forward": {
            **block["feed_forward"],
            "down": jax.tree.map(jnp.zeros_like, block["feed_forward"]["down"]),
        },
    }
    params = {**params, "stack": {**params["stack"], "layers_0": {"block_0": {**block, **silent}}}}

    @functools.partial(jax.jit, static_argnums=0)
    def run(deterministic, seed=0):
        out = model.apply(
            {"params": params}, inputs, deterministic=deterministic, rngs={"dropout": jax.random.key(seed)}
        )
        return out[0] if isinstance(out, tuple) else out

    assert relative_error(run(False), run(True)) > 0.1
    assert relative_error(run(False, 1), run(False)) > 0.1


@pytest.mark.parametrize("token", slow_unless([11, -1], (-1,)))
def test_tokens_outside_the_vocabulary(token):
    """Raises an error if they are known; if traced they give NaN, never another token's vector."""
    wrong = TOKENS.at[0, 2].set(token)
    model = DecoderLM(DecoderConfig(vocab_size=11, **SIZE))
    variables = drawn(model.init, TOKENS)
    message = rf"tokens must be 0 to vocab_size-1=10, got \[{token}\]"
    with pytest.raises(ValueError, match=message):
        model.apply(variables, wrong)
    with pytest.raises(ValueError, match=message):
        model.apply(variables, wrong, cache=model.init_cache(2, 6))
    logits = jax.jit(lambda t: model.apply(variables, t)[0])(wrong)
    assert np.isnan(logits[0, 2:]).all()
    assert not np.isnan(logits[1]).any()
    classifier = Classifier(encoder_config())
    variables = drawn(classifier.init, TOKENS)
    with pytest.raises(ValueError, match=message):
        classifier.apply(variables, wrong)
    # In padding any token will do.
    there = jnp.array([2, 6])
    np.testing.assert_array_equal(
        classifier.apply(variables, wrong, lengths=there), classifier.apply(variables, TOKENS, lengths=there)
    )


@pytest.mark.parametrize(
    ("lengths", "message"),
    [
        (jnp.array([0, 6]), r"lengths must be 1 to 6, got \[0\]"),
        (jnp.array([3, 7]), r"lengths must be 1 to 6, got \[7\]"),
        (jnp.array([3]), r"lengths must be integers of shape \(2,\), got int32 \(1,\)"),
        (jnp.array([[3, 4]]), r"lengths must be integers of shape \(2,\), got int32 \(1, 2\)"),
        (jnp.array([3.0, 4.0]), r"lengths must be integers of shape \(2,\), got float32 \(2,\)"),
        (5, r"lengths must be integers of shape \(2,\), got int None"),
    ],
)
def test_lengths_that_cannot_be(lengths, message):
    model = Classifier(encoder_config())
    variables = drawn(model.init, TOKENS)
    with pytest.raises(ValueError, match=message):
        model.apply(variables, TOKENS, lengths=lengths)
    regressor = Regressor(RegressorConfig(num_inputs=3, is_causal=False, **SIZE))
    with pytest.raises(ValueError, match=message):
        regressor.init(jax.random.key(0), VECTORS, lengths=lengths)


def test_lengths_of_pairs():
    model = PairClassifier(encoder_config())
    pairs = TOKENS.reshape(1, 2, 6)
    with pytest.raises(ValueError, match=r"lengths must be integers of shape \(1, 2\), got int32 \(2,\)"):
        model.init(jax.random.key(0), pairs, lengths=jnp.array([3, 4]))


@pytest.mark.parametrize("pooling", slow_unless(["mean", "max", "cls"], ("max",)))
def test_traced_lengths_out_of_range_give_numbers(pooling):
    model = Classifier(encoder_config(pooling=pooling))
    variables = drawn(model.init, TOKENS)
    run = jax.jit(lambda n: model.apply(variables, TOKENS, lengths=n))
    assert np.isfinite(run(jnp.array([0, 6]))).all()
    np.testing.assert_array_equal(run(jnp.array([3, 9])), run(jnp.array([3, 6])))


def test_traced_lengths_beyond_the_tokens_mean_all_of_them_to_compressed_tokens():
    """Their positions are spread over the existing tokens."""
    model = Classifier(encoder_config(mechanism=BRLConfig(window=2, num_compressed=2)))
    variables = drawn(model.init, TOKENS)
    run = jax.jit(lambda n: model.apply(variables, TOKENS, lengths=n))
    np.testing.assert_array_equal(run(jnp.array([3, 60])), run(jnp.array([3, 6])))


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8])
def test_lengths_of_few_bits(dtype):
    """Rows may be longer than such a type can count."""
    lengths = np.array([100, 3])
    np.testing.assert_array_equal(existing(lengths.astype(dtype), 300).sum(1), lengths)
    model = Classifier(encoder_config(pooling="cls", max_length=260))
    tokens = jax.random.randint(jax.random.key(0), (2, 258), 0, 11)
    variables = drawn(model.init, tokens)
    few = np.array([255 if dtype == jnp.uint8 else 127, 3])
    run = jax.jit(lambda n: model.apply(variables, tokens, lengths=n))
    np.testing.assert_array_equal(run(few.astype(dtype)), run(few.astype(np.int32)))


def test_places_of_masked_tokens():
    model = MaskedLM(encoder_config())
    variables = drawn(model.init, TOKENS, places=jnp.zeros((2, 1), jnp.int32))
    for places, message in (
        ([[0, 6], [1, 2]], r"places must be 0 to 5, got \[6\]"),
        ([[0, 1]], r"places must be integers of shape \(2, 2\), got int32 \(1, 2\)"),
    ):
        with pytest.raises(ValueError, match=message):
            model.apply(variables, TOKENS, jnp.array(places))


def test_inputs_of_another_type():
    model = Classifier(encoder_config(inputs="features", num_features=3))
    for inputs, message in (
        (VECTORS[..., :2], r"inputs must have shape \(batch, length, 3\), not empty, got \(2, 6, 2\)"),
        (VECTORS.astype(jnp.complex64), "inputs must be real numbers, got complex64"),
        ([[1, 2]], "inputs must be an array, got list"),
    ):
        with pytest.raises(ValueError, match=message):
            model.apply({"params": {}}, inputs)


def test_targets_outside_the_vocabulary():
    hidden, targets = jnp.ones((1, 3, 4)), jnp.array([[0, 1, 5]])

    def loss(targets, weights=None):
        return cross_entropy(hidden, lambda h: h, targets, weights, vocab_size=4)[0]

    for wrong in (5, -1):
        with pytest.raises(ValueError, match=rf"targets must be 0 to vocab_size-1=3, got \[{wrong}\]"):
            loss(targets.at[0, 2].set(wrong))
        assert np.isnan(jax.jit(loss)(targets.at[0, 2].set(wrong)))
        # A token of weight 0 may have any target.
        weights = jnp.array([[1.0, 1.0, 0.0]])
        np.testing.assert_allclose(loss(targets.at[0, 2].set(wrong), weights), 2 * np.log(4), rtol=1e-6)
    with pytest.raises(ValueError, match=r"targets must be integers of shape \(1, 3\), got int32 \(1, 2\)"):
        loss(targets[:, :2])
