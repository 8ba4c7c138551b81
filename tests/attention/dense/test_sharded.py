"""Keys that go around the devices: an oracle's numbers, equal work, and no device with a whole row."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.dense import sharded
from tests.attention.dense import ring
from tests.marks import slow_unless
from tests.oracles.attention import softmax_attention, softmax_attention_gradients

pytestmark = pytest.mark.xdist_group("devices")


@pytest.fixture
def result(devices):
    return functools.partial(devices.ask, "tests.attention.dense.ring")


def expected(name):
    """The output and the gradients of a case in float64."""
    settings = ring.CASES[name]
    _, (query, key, value, *sinks), d_out = ring.case(**settings)
    arrays = [np.asarray(x.astype(jnp.float32), np.float64) for x in (query, key, value)]
    d_out = np.asarray(d_out.astype(jnp.float32), np.float64)
    length, keys = query.shape[1], key.shape[1]
    visible = np.ones((8, 1, length, keys), bool)
    if settings.get("is_causal", True):
        visible &= np.arange(length)[:, None] >= np.arange(keys)
    if settings.get("segments"):
        ids = np.asarray(ring.packed(length))
        visible &= (ids[:, :, None] == ids[:, None])[:, None]
    if "lengths" in settings:
        visible &= (np.arange(keys) < np.array(settings["lengths"])[:, None])[:, None, None]
    options = {"sinks": sinks[0] if sinks else None, "cap": settings.get("logits_soft_cap")}
    options["scale"] = settings.get("scale")
    if "steps" in settings:
        return retrieved(*arrays, visible, d_out, settings["steps"], options["scale"])
    out, _ = softmax_attention(*arrays, visible, **options)
    d_query, d_key, d_value, _, *d_sinks = softmax_attention_gradients(*arrays, visible, d_out, **options)
    return [out, d_query, d_key, d_value, *d_sinks]


def retrieved(query, key, value, visible, d_out, steps, scale):
    """Hopfield attention and its gradients, by the chain rule over its steps."""
    states = [query]
    for _ in range(steps - 1):
        states.append(softmax_attention(states[-1], key, key, visible, scale=scale)[0])
    out, _ = softmax_attention(states[-1], key, value, visible, scale=scale)
    d_state, d_key, d_value, _ = softmax_attention_gradients(
        states[-1], key, value, visible, d_out, scale=scale
    )
    for state in reversed(states[:-1]):
        d_state, *d_keys, _ = softmax_attention_gradients(state, key, key, visible, d_state, scale=scale)
        d_key = d_key + sum(d_keys)
    return [out, d_state, d_key, d_value]


FAST = ("hopfield", "causal", "causal, packed", "both ways, odd stretches, packed, padded")


@pytest.mark.parametrize("name", slow_unless(ring.CASES, FAST))
def test_numbers_and_gradients_are_the_oracles(result, name):
    tolerance = 2e-2 if "bfloat16" in name else 2e-5
    got, wanted = result(name), expected(name)
    assert len(got) == len(wanted)
    for a, b in zip(got, wanted, strict=True):
        assert np.abs(b).max() > 0.01
        assert np.isfinite(a).all()
        assert np.abs(a - b).max() <= tolerance * np.abs(b).max()


@pytest.mark.parametrize("case", slow_unless(("1", "17", "30", "17, hopfield"), ("17",)))
def test_later_tokens_change_no_bit(result, case):
    place = int(case.split(",")[0])
    whole, other = result(f"after {case}")
    assert (whole[:, :place] == other[:, :place]).all()
    assert not (whole[:, place:] == other[:, place:]).all()


def test_all_devices_do_the_same_visible_work_in_each_round(result):
    done, seen = np.moveaxis(result("work"), 2, 0)[::-1]
    assert (done == seen).all()
    assert (done == done[:1]).all()
    assert done.sum() == 96 * 97 // 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ring.MOVED)
def test_no_row_is_gathered(result, name):
    """Eight rows on two devices: a stretch of 1,024 tokens has 4 x 1,024 x 16 numbers of the keys, and four times as
    many make the rows."""
    found = result(f"moved {name}")
    assert {kind for kind, _ in found} == {"collective-permute"}
    assert max(elements for _, elements in found) <= 4 * 1024 * 32


def test_odd_stretches_of_causal_attention_are_refused():
    odd = jnp.zeros((1, 3, 1, 8))
    with pytest.raises(
        ValueError, match=r"same even number of tokens per device where is_causal, got 3 and 3"
    ):
        jax.eval_shape(lambda x: sharded.full_attention(x, x, x, axis_name="x", is_causal=True), odd)
