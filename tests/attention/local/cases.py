"""The patterns of local attention, which pairs each sees, and a call through XLA."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.far_patterns import (
    Axial,
    BigBird,
    BlockMask,
    Fixed,
    GlobalWindow,
    Strided,
)
from brl_jax.attention.local.patterns import (
    BlockDiagonal,
    Bucketed,
    Dilated,
    Neighbourhood,
    SlidingWindow,
    SurroundedBlocks,
)
from tests.marks import slow_unless
from tests.oracles import attention as oracles
from tests.support.attention import outputs_and_gradients

MASK = np.random.default_rng(5).random((12, 12)) < 0.3
BIG_BIRD = BigBird(8, window_blocks=3, global_blocks=1, random_blocks=2, seed=1)
# name: (pattern, sees(i, j) for absolute positions)
PATTERNS = {
    "sliding": (SlidingWindow(7, 3), oracles.sliding(7, 3)),
    "sliding_wide": (SlidingWindow(40, 300), oracles.sliding(40, 300)),
    "dilated": (Dilated(3, 2, 3), oracles.dilated(3, 2, 3)),
    "block_diagonal": (BlockDiagonal(50), oracles.block_diagonal(50)),
    "block_diagonal_small": (BlockDiagonal(7), oracles.block_diagonal(7)),
    "bucketed": (Bucketed(16), oracles.bucketed(16, 1, 1)),
    "bucketed_before": (Bucketed(7, 2, 0), oracles.bucketed(7, 2, 0)),
    "surrounded": (SurroundedBlocks(12, 15), oracles.surrounded(12, 15)),
    "strided": (Strided(11), oracles.strided(11)),
    "fixed": (Fixed(16, 2), oracles.fixed(16, 2)),
    "global_window": (GlobalWindow(5, 4, 3), oracles.global_window(5, 4, 3)),
    "axial": (Axial(13), oracles.axial(13)),
    "neighbourhood": (Neighbourhood(10, 2, 3), oracles.neighbourhood(10, 2, 3)),
    "global_segments": (GlobalWindow(5, 4, 6, 9), oracles.global_window(5, 4, 6, 9)),
    "big_bird": (BIG_BIRD, oracles.big_bird(8, 3, 1, BIG_BIRD.random_lists(-(-130 // 8)))),
    "block_mask": (BlockMask.of(13, MASK), oracles.block_mask(13, MASK)),
}
# Sinks for four heads.
SINKS = jnp.asarray([0.7, -1.3, 2.0, 0.1])
# Only what runs on a CPU: including the TPU kernels would double the time, and test_tpu.py tests them.
xla_attention = functools.partial(local_attention, implementation="xla")
run = functools.partial(outputs_and_gradients, local_attention, implementation="xla")
# Both schedules run the same code on blocks, so arguments outside test_pattern_equals_oracle are fast only in the loop.
BOTH = pytest.mark.parametrize("schedule", slow_unless(("loop", "at_once"), ("loop",)), indirect=True)
