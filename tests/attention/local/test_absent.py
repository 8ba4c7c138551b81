"""Segment ids may be any int32: no backend mistakes one for its own mark of a missing token."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.local.far_patterns import Fixed, GlobalWindow, Strided
from brl_jax.attention.local.patterns import Dilated, SlidingWindow
from tests.attention.local.cases import BOTH, run
from tests.marks import slow_unless
from tests.oracles import attention as oracles
from tests.support.attention import expect, random_qkv

ENDS = np.iinfo(np.int32)
# Each row's ids, and its number of existing keys: padded keys once were visible to keys of segment -1.
ROWS = (
    ([-1], 80),
    ([-2], 100),
    ([ENDS.min], 130),
    ([ENDS.max], 129),
    ([-1, ENDS.max, -2, 0, 1, ENDS.min], 110),
)
PATTERNS = {
    "sliding": (SlidingWindow(31, 31), oracles.sliding(31, 31)),
    "dilated": (Dilated(4, 4, 4), oracles.dilated(4, 4, 4)),
    "strided": (Strided(11), oracles.strided(11)),
    "fixed": (Fixed(16, 2), oracles.fixed(16, 2)),
    "global_window": (GlobalWindow(5, 4, 3), oracles.global_window(5, 4, 3)),
}


def check(name, implementation):
    """Outputs and gradients equal the oracle's for all kinds of segment ids, together with lengths."""
    pattern, sees = PATTERNS[name]
    arrays = random_qkv(130, batch=len(ROWS), heads=2, kv_heads=1)
    segments = np.stack([np.resize(np.repeat(ids, 25), 130) for ids, _ in ROWS]).astype(np.int32)
    lengths = np.array([length for _, length in ROWS], np.int32)
    visible = (segments[:, :, None] == segments[:, None, :]) & oracles.pairs(130, 130, sees)
    visible &= np.arange(130)[None, None, :] < lengths[:, None, None]
    options = {"segment_ids": jnp.asarray(segments), "key_value_seq_lengths": jnp.asarray(lengths)}
    want = expect(arrays, visible[:, None])
    for got, expected in zip(run(*arrays, implementation=implementation, pattern=pattern, **options), want):
        assert oracles.relative_error(got, expected) < 1e-5


# Fast: the window kernel and the kernel for any pattern. Dilated windows use the former, on rearranged tokens.
@pytest.mark.parametrize("name", slow_unless(PATTERNS, ("sliding", "global_window")))
def test_interpreted_kernels(name):
    check(name, "pallas_interpret")


@BOTH
@pytest.mark.parametrize("name", slow_unless(PATTERNS, ("sliding", "global_window")))
def test_xla(schedule, name):
    check(name, "xla")
