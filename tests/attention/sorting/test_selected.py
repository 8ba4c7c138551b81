"""Attention to listed blocks through XLA, in both forms, against a float64 oracle."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.sorting import selected
from tests.oracles import kernels as oracle
from tests.oracles.attention import relative_error
from tests.support.attention import pulled

LENGTHS, SIZE, BLOCKS, SCALE = (23, 1, 12), 6, 3, 0.3


def listed_blocks():
    """Lists (1, T, K, M) with each query's block, earlier blocks and holes, in packed sequences; and which keys each
    head sees, (1, N, T, S)."""
    rng, total = np.random.default_rng(7), sum(LENGTHS)
    starts = np.full((1, total, 2, BLOCKS), total, np.int32)
    seen = np.zeros((1, 2, total, total), bool)
    firsts = np.repeat(np.cumsum((0, *LENGTHS[:-1])), LENGTHS)
    for t, head in np.ndindex(total, 2):
        own = (t - firsts[t]) // SIZE
        chosen = [own, *rng.permutation(own)[: rng.integers(0, BLOCKS)]]
        for slot, block in zip(rng.permutation(BLOCKS), chosen):
            start = starts[0, t, head, slot] = firsts[t] + block * SIZE
            seen[0, head, t, start : min(start + SIZE, t + 1)] = True
    return starts, np.repeat(seen, 2, axis=1)


@pytest.mark.parametrize("all_keys", [4, 0])
def test_results_and_gradients_equal_the_oracle(all_keys, monkeypatch):
    monkeypatch.setattr(selected, "_ALL_KEYS", all_keys)
    monkeypatch.setattr(selected, "_QUERY_BLOCK", 20)
    starts, seen = listed_blocks()
    total = starts.shape[1]
    rng = np.random.default_rng(0)
    query, d_out = (jnp.asarray(rng.standard_normal((1, total, 4, 8)), jnp.float32) for _ in range(2))
    key, value = (jnp.asarray(rng.standard_normal((1, total, 2, 8)), jnp.float32) for _ in range(2))

    def run(*arrays):
        options = {"size": SIZE, "scale": SCALE, "implementation": "xla"}
        return selected.selected_attention(*arrays, jnp.asarray(starts), **options)

    got = pulled(run, d_out, query, key, value)
    out, _, *gradients = oracle.attention(query, key, value, seen, SCALE, d_out)
    for have, want in zip(got, (out, *gradients), strict=True):
        assert relative_error(have, want) < 1e-5
    changed = pulled(run, d_out, query, *(x.at[:, 30:].add(1.0) for x in (key, value)))
    np.testing.assert_array_equal(changed[0][:, :30], got[0][:, :30])
    assert np.all(np.any(changed[0][:, 30:] != got[0][:, 30:], axis=(0, 2, 3)))


def test_short_sequences_score_all_keys_and_long_ones_gather():
    def products(keys):
        shapes = [(1, 8, 2, 4), (1, keys, 1, 4), (1, keys, 1, 4)]
        arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
        lists = jax.ShapeDtypeStruct((1, 8, 1, 2), jnp.int32)
        run = lambda *x: selected.selected_attention(*x, size=4, scale=1.0, implementation="xla")  # noqa: E731
        return str(jax.make_jaxpr(run)(*arrays, lists))

    assert "gather" not in products(32)
    assert "gather" in products(33)
