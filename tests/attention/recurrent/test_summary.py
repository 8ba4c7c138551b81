"""Summaries of runs of tokens: states after them, joined runs, and sequences that a caller divides over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from brl_jax import state_functions
from tests.marks import slow_unless
from tests.support.meshes import check_equal, draw, with_gradients

B, T, N, K, H, DEVICES = 2, 44, 4, 2, 8, 4
IDENTITY = {"normalize": False, "feature_map": "identity"}
# Settings, and the tokens' further arrays.
CASES = {
    "linear": ({"feature_map": "relu"}, ()),
    "linear, unnormalized": (IDENTITY, ()),
    "linear, decay of a head": (IDENTITY | {"log_decay": jnp.asarray([-0.05, -0.2])}, ()),
    "linear, decay of a token": (IDENTITY, ("log_decay",)),
    "linear, decay of a feature": (IDENTITY, ("log_decays",)),
    "deltanet": ({}, ("beta",)),
    "gated_deltanet": ({}, ("beta", "log_decay")),
    "kda": ({}, ("beta", "log_decays")),
    "gated_deltanet_2": ({}, ("erase", "write", "log_decays")),
    "rwkv7": ({}, ("removal_key", "learning_rate", "log_decays")),
}


def drawn(name):
    """Queries, keys, values and the further arrays; one token forgets all others."""
    query = draw(B, T, N, H, seed=0)
    key, value = draw(B, T, K, H, seed=1), draw(B, T, K, H, seed=2)
    made = {
        "beta": jax.nn.sigmoid(draw(B, T, K, seed=3)),
        "log_decay": (-jnp.exp(draw(B, T, K, seed=4) - 2)).at[1, 30].set(-jnp.inf),
        "erase": jax.nn.sigmoid(draw(B, T, K, H, seed=6)),
        "write": jax.nn.sigmoid(draw(B, T, K, H, seed=7)),
        "removal_key": draw(B, T, K, H, seed=8),
        "learning_rate": jax.nn.sigmoid(draw(B, T, K, H, seed=6)),
        "log_decays": (-jnp.exp(2 * draw(B, T, K, H, seed=4) - 3)).at[1, 30].set(-jnp.inf),
    }
    return query, key, value, {x.rstrip("s"): made[x] for x in CASES[name][1]}


def functions(name):
    return state_functions(name.split(",")[0], **CASES[name][0], chunk_size=8)


def by_hand(name, query, key, value, arrays):
    """The outputs and the last state of sequences that are divided over devices by their tokens."""
    rule = functions(name)
    mesh = jax.sharding.Mesh(jax.devices()[:DEVICES], ("context",))
    cut = PartitionSpec(None, "context")

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=cut, out_specs=(cut, PartitionSpec("context")))
    def shard(query, key, value, arrays):
        summary = rule.summarize(key, value, **arrays)
        every = jax.lax.all_gather(summary, "context")
        state = rule.init(B, K, H)
        for i in range(DEVICES - 1):
            after = jax.tree.map(lambda x, i=i: x[i], every).apply(state)
            earlier = i < jax.lax.axis_index("context")
            state = jax.tree.map(lambda a, b, earlier=earlier: jnp.where(earlier, a, b), after, state)
        out, state = rule.extend(query, key, value, state, **arrays)
        return out, jax.tree.map(lambda x: x[None], state)

    out, states = shard(query, key, value, arrays)
    return out, jax.tree.map(lambda x: x[-1], states)


def at_once(name, query, key, value, arrays):
    rule = functions(name)
    return rule.extend(query, key, value, rule.init(B, K, H), **arrays)


def _compared(name):
    found = (with_gradients(functools.partial(f, name))(*drawn(name)) for f in (at_once, by_hand))
    return [[np.asarray(x) for x in jax.tree.leaves(each)] for each in found]


PARTS = {name: functools.partial(_compared, name) for name in CASES}


@pytest.mark.xdist_group("devices")
@pytest.mark.parametrize("name", slow_unless(CASES, ("linear, decay of a token", "kda", "rwkv7")))
def test_a_caller_divides_sequences_over_devices(devices, name):
    expected, got = devices.ask(__name__, name)
    # The gradient with respect to a logarithm of -inf is 0 on both sides.
    check_equal(expected, got, 2e-5)


@pytest.mark.parametrize(
    "name", slow_unless(CASES, ("linear", "linear, decay of a feature", "kda", "gated_deltanet_2"))
)
def test_summaries_join_and_give_the_state_after_any_state(name):
    rule = functions(name)
    query, key, value, arrays = drawn(name)
    like = rule.init(B, K, H)
    start = jax.tree.map(lambda x: draw(*x.shape, seed=5), like)

    def part(first, last):
        return jax.tree.map(lambda x: x[:, first:last], (key, value)), {
            n: x[:, first:last] for n, x in arrays.items()
        }

    a, b, c = (
        jax.jit(rule.summarize)(*tokens, **more) for tokens, more in (part(0, 5), part(5, 29), part(29, T))
    )
    _, expected = rule.extend(query, key, value, start, **arrays)
    for summary in (a.then(b).then(c), a.then(b.then(c)), rule.summarize(key, value, **arrays)):
        for x, y in zip(jax.tree.leaves(summary.apply(start)), jax.tree.leaves(expected)):
            np.testing.assert_allclose(x, y, rtol=1e-4, atol=1e-5)
    shape = (B, K, *{"linear": (1, 1), "kda": (H, H)}.get(name.split(",")[0], (H, H)))
    if name == "linear, decay of a feature":
        shape = (B, K, H, 1)
    assert (None if a.transition is None else a.transition.shape) == (
        None if name in ("linear", "linear, unnormalized") else shape
    )


def test_tokens_without_decay_before_tokens_with_decay():
    _, key, value, arrays = drawn("linear, decay of a token")
    rule = functions("linear, unnormalized")
    first, later = rule.summarize(key, value), rule.summarize(key, value, **arrays)
    start = jax.tree.map(lambda x: draw(*x.shape, seed=5), rule.init(B, K, H))
    both, expected = first.then(later).apply(start), later.apply(first.apply(start))
    np.testing.assert_allclose(both.key_value, expected.key_value, rtol=1e-5)


def test_bad_input():
    _, key, value, arrays = drawn("kda")
    with pytest.raises(
        ValueError,
        match="summarize needs one of linear, deltanet, gated_deltanet, kda, gated_deltanet_2, rwkv7, got",
    ):
        state_functions("norm").summarize(key, value)
    with pytest.raises(ValueError, match="summarize of 'kda' takes beta, log_decay, got 'segment_ids'"):
        functions("kda").summarize(key, value, **arrays, segment_ids=jnp.zeros((B, T), jnp.int32))
    with pytest.raises(ValueError, match="value must have key's batch, length and heads"):
        functions("kda").summarize(key, value[:, 1:], **arrays)
