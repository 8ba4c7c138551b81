"""A trained decoder with other mechanisms: what it takes over, and how far its layers are."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from brl_jax.layers import (
    MECHANISMS,
    BRLConfig,
    FullConfig,
    GatedDeltaNetConfig,
    GAUConfig,
    LocalConfig,
    TLinFormerConfig,
)
from brl_jax.models import DecoderConfig, DecoderLM
from brl_jax.models.conversion import converted, matching_errors, mixers, replaced_layers, with_mixers
from tests.oracles.parts import feed_forward, layer_norm
from tests.support.parameters import drawn

TEACHER = DecoderConfig(num_layers=4, d_model=32, num_heads=4, d_ff=48, vocab_size=61, mechanism=FullConfig())
BRL = BRLConfig(window=8, num_compressed=4, block_size=8, history_size=16)
TOKENS = jnp.asarray(np.random.default_rng(7).integers(0, 61, (3, 24)), jnp.int32)


def fresh(config, seed):
    return drawn(DecoderLM(config).init, TOKENS[:1, :1], seed=seed)["params"]


@pytest.fixture(scope="module")
def teacher():
    """Larger weights than a fresh network's, so that what tokens read of each other matters."""
    return jax.tree.map(lambda x: 2 * x if x.ndim > 2 else x, fresh(TEACHER, 0))


def with_mechanisms(**changes):
    return dataclasses.replace(TEACHER, **changes)


def errors(config, params, teacher, teacher_config=TEACHER, **options):
    return jax.jit(lambda p, t: matching_errors(config, p, teacher_config, t, TOKENS, **options))(
        params, teacher
    )


def test_the_same_mechanism_is_the_same_network(teacher):
    params = converted(TEACHER, fresh(TEACHER, 1), TEACHER, teacher)
    jax.tree.map(np.testing.assert_array_equal, params, teacher)
    np.testing.assert_array_equal(errors(TEACHER, params, teacher), np.zeros(4))
    assert (errors(TEACHER, fresh(TEACHER, 1), teacher) > 0.1).all()


@pytest.mark.parametrize("late", [False, True])
def test_what_is_taken_over_and_what_is_new(teacher, late):
    hybrid = {"late_mechanism": FullConfig(), "schedule": "alternate"} if late else {}
    config = with_mechanisms(mechanism=BRL, **hybrid)
    start = fresh(config, 1)
    got, new, theirs = (
        traverse_util.flatten_dict(each, sep="/")
        for each in (converted(config, start, TEACHER, teacher), start, teacher)
    )
    mixer = "stack/layers_0/block_0/mixer"
    layers = [0, 2] if late else [0, 1, 2, 3]
    taken = set()
    for name in theirs:
        if "/layers_0/" not in name:
            np.testing.assert_array_equal(got[name], theirs[name])
            taken.add(name)
            continue
        ours = name.replace(f"{mixer}/", f"{mixer}/local/")
        np.testing.assert_array_equal(got[ours], theirs[name][np.array(layers)])
        taken.add(ours)
        if late:
            other = name.replace("block_0", "block_1")
            np.testing.assert_array_equal(got[other], theirs[name][np.array([1, 3])])
            taken.add(other)
    assert {f"{mixer}/compressed/compress_source/kernel", f"{mixer}/lambda", "stack/carrier_0/tokens"} <= set(
        got
    ) - taken
    for name in set(got) - taken:
        np.testing.assert_array_equal(got[name], new[name])


def test_heads_of_another_width_are_not_taken_over(teacher):
    config = with_mechanisms(mechanism=MECHANISMS["retnet"]())
    start = fresh(config, 1)
    got = converted(config, start, TEACHER, teacher)
    ours, new = (each["stack"]["layers_0"]["block_0"]["mixer"] for each in (got, start))
    theirs = teacher["stack"]["layers_0"]["block_0"]["mixer"]
    np.testing.assert_array_equal(ours["query"]["kernel"], theirs["query"]["kernel"])
    np.testing.assert_array_equal(ours["value"]["kernel"], new["value"]["kernel"])
    assert ours["value"]["kernel"].shape != theirs["value"]["kernel"].shape


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [LocalConfig(window=6), BRL, GatedDeltaNetConfig()])
def test_errors_are_those_of_each_layer_alone(teacher, mechanism):
    """Against layers called one by one on hidden states that the blocks of the trained network pass on."""
    config = with_mechanisms(
        mechanism=mechanism, late_mechanism=FullConfig(), schedule="alternate", early_layers=1
    )
    params = converted(config, fresh(config, 1), TEACHER, teacher)
    weights = jnp.asarray(np.random.default_rng(0).uniform(size=TOKENS.shape) > 0.4, jnp.float32)
    got = errors(config, params, teacher, weights=weights)
    dimensions = TEACHER.dimensions
    x = np.asarray(teacher["embedding"][TOKENS] * 32**0.5)
    blocks, expected = jax.tree.map(np.asarray, nn.unbox(teacher["stack"]["layers_0"]["block_0"])), []
    own = params["stack"]["layers_0"]
    carrier = mechanism.carrier(dimensions, parent=None)
    carry = carrier and carrier.apply({"params": params["stack"]["carrier_0"]}, x, None)
    for i in range(4):
        block = jax.tree.map(lambda a, i=i: a[i], blocks)
        read = layer_norm(x, block["mixer_norm"])
        target, *_ = FullConfig().layer(dimensions, parent=None).apply({"params": block["mixer"]}, read)
        new = mechanism if i % 2 == 0 else FullConfig()
        mixer = jax.tree.map(lambda a, i=i: a[i // 2], own[f"block_{i % 2}"]["mixer"])
        y, after, _ = new.layer(dimensions, parent=None).apply(
            {"params": mixer}, read, carry=carry if i % 2 == 0 else None
        )
        carry = after if i % 2 == 0 else carry
        chosen = np.asarray(weights) > 0
        ours, theirs = np.asarray(y, np.float64)[chosen], np.asarray(target, np.float64)[chosen]
        expected.append(((ours - theirs) ** 2).sum() / ((theirs - theirs.mean(0)) ** 2).sum())
        x = x + np.asarray(target)
        x = x + feed_forward(layer_norm(x, block["feed_forward_norm"]), block["feed_forward"])
    np.testing.assert_allclose(got, expected, rtol=2e-4, atol=1e-9)
    assert expected[0] > 0.01 > expected[1]


@pytest.mark.slow
def test_matching_moves_the_new_mechanisms_alone_and_brings_them_nearer(teacher):
    config = with_mechanisms(mechanism=BRL)
    own = mixers(converted(config, fresh(config, 1), TEACHER, teacher))
    adam = optax.adam(1e-2)

    def loss(both):
        return matching_errors(config, both["own"], TEACHER, both["teacher"], TOKENS).mean()

    @jax.jit
    def step(both, state):
        value, grads = jax.value_and_grad(loss)(both)
        with jax.numpy_dtype_promotion("standard"):
            updates, state = adam.update(grads, state)
        return optax.apply_updates(both, updates), state, value, grads["teacher"]

    both = {"own": own, "teacher": teacher}
    state, values = adam.init(both), []
    for _ in range(60):
        both, state, value, into_teacher = step(both, state)
        values.append(float(value))
    assert values[-1] < values[0] / 4, values
    jax.tree.map(np.testing.assert_array_equal, both["teacher"], teacher)
    assert all(not np.asarray(grad).any() for grad in jax.tree.leaves(into_teacher))
    whole = with_mixers(teacher | {"stack": {"final_norm": teacher["stack"]["final_norm"]}}, both["own"])
    assert set(whole["stack"]) == {"final_norm", "carrier_0", "layers_0"}
    assert not np.array_equal(
        *(each["stack"]["layers_0"]["block_0"]["mixer"]["lambda"] for each in (both["own"], own))
    )


def test_which_layers_are_replaced():
    config = with_mechanisms(mechanism=BRL, late_mechanism=FullConfig(), schedule="alternate", early_layers=3)
    assert replaced_layers(config, TEACHER) == (True, True, True, False)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"mechanism": GAUConfig()}, "gau cannot replace full: their blocks"),
        ({"mechanism": TLinFormerConfig()}, "tlinformer arranges its own layers"),
        (
            {"mechanism": FullConfig(post_norm=True)},
            r"full cannot replace full.*'post' and 'pre'",
        ),
        ({"mechanism": BRL, "num_layers": 2}, "num_layers must be 4, as trained, got 2"),
        ({"mechanism": dataclasses.replace(BRL, memory="output")}, "cannot be matched one by one"),
    ],
)
def test_what_cannot_be_matched_is_refused(teacher, changes, expected):
    config = with_mechanisms(**changes)
    with pytest.raises(ValueError, match=expected):
        matching_errors(config, {}, TEACHER, teacher, TOKENS)
