"""The recurrent functions' form for GPUs, which computes all chunks at once; run on a CPU.

tests/attention/test_oracles.py and test_state_functions.py run both forms."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from brl_jax.attention.recurrent import squared_relu
from tests.marks import slow_unless
from tests.oracles.parts import each_head
from tests.oracles.recurrent import delta, gau
from tests.support.attention import close, random_qkv
from tests.support.states import CASES, at_once

CHUNK = 16


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "performer"])
def test_both_directions_see_their_segment(name, all_at_once):
    """Without causality, chunks of packed sequences are scanned in both directions."""
    arrays = random_qkv(70, batch=1)[:3]
    cuts = [0, 9, 40, 70]
    ids = jnp.repeat(jnp.arange(3), jnp.diff(jnp.asarray(cuts)), total_repeat_length=70)[None]
    function = functools.partial(CASES[name].function, **CASES[name].settings)
    got = jax.jit(functools.partial(function, chunk_size=8))(*arrays, segment_ids=ids)
    for a, b in itertools.pairwise(cuts):
        close(got[:, a:b], function(*(x[:, a:b] for x in arrays)))


@pytest.mark.parametrize(("platform", "loops"), [("cuda", False), ("cpu", True)])
def test_the_platform_decides_how_bsbr_reads_a_prompt(platform, loops):
    arrays = random_qkv(64, batch=1)[:3]
    functions = CASES["bsbr"].functions("bsbr", chunk_size=CHUNK, implementation="xla")
    state = functions.init(1, 2, 8)
    traced = jax.jit(lambda *x: functions.extend(*x, state, **CASES["bsbr"].more(*x))).trace(*arrays)
    assert ("stablehlo.while" in traced.lower(lowering_platforms=(platform,)).as_text()) == loops


def test_gau_takes_many_queries_at_once(all_at_once, monkeypatch):
    """Takes 24 queries per piece, since they fit in memory, although 8 are requested."""
    arrays = random_qkv(70)[:3]
    monkeypatch.setattr(squared_relu, "_GPU_SCORES", 2 * 4 * 70 * 24)
    attend = functools.partial(brl_jax.gau_attention, is_causal=True, chunk_size=8)
    text = str(jax.make_jaxpr(functools.partial(attend, implementation="xla"))(*arrays))
    assert "length=3" in text
    none = np.zeros((70, 4, 1))
    rows = zip(*(np.asarray(x, np.float64) for x in arrays))
    close(jax.jit(attend)(*arrays), [each_head(gau)(*row, none, none, is_causal=True) for row in rows])


NAMES = [name for name in CASES if name.split(",")[0] in (
    "linear", "cosformer", "performer", "deltanet", "gated_deltanet", "kda", "gated_deltanet_2", "rwkv7", "flash"
)]  # fmt: skip


@pytest.mark.parametrize(("platform", "loops"), [("cuda", False), ("cpu", True), ("tpu", True)])
@pytest.mark.parametrize("name", slow_unless(NAMES, {*NAMES} - {"kda"}))
def test_the_platform_that_a_call_is_lowered_for_decides(name, platform, loops):
    attend = functools.partial(at_once(name), chunk_size=CHUNK)
    text = jax.jit(attend).trace(*random_qkv(96, batch=1)[:3]).lower(lowering_platforms=(platform,)).as_text()
    assert ("stablehlo.while" in text) == loops


@pytest.mark.slow
def test_long_products_of_the_delta_rule_stay_precise(all_at_once):
    """The joined float32 maps of 4,096 chunks, against the recurrence in float64."""
    query, key, value = random_qkv(2**15, batch=1, heads=1, kv_heads=1, head_dim=4)[:3]
    beta = jnp.asarray(np.random.default_rng(3).random((1, 2**15, 1)), jnp.float32)
    got = jax.jit(functools.partial(brl_jax.delta_rule, chunk_size=8))(query, key, value, beta=beta)
    query, key, value, beta = (np.asarray(x[0, :, 0], np.float64) for x in (query, key, value, beta))
    close(got[0, :, 0], delta(query, key / np.linalg.norm(key, axis=-1, keepdims=True), value, beta))
