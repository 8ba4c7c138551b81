"""The states before all chunks of a sequence at once, in a logarithmic number of steps.

A chunk's summary describes how it changes the state. Summaries of neighbours can be joined, so a tree computes the
states before all chunks (Blelloch 1990, "Prefix sums and their applications").
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

#: (summary, summary of the following chunks, their keeps) -> the summary of all. Associative. Arrays and `keeps` have
#: leading axes (B, chunks); False in `keeps` drops the past, None keeps it.
Join = Callable[[Any, Any, Bool[Array, "B chunks"] | None], Any]
#: (state, summary of the following chunks, their keeps) -> the state after them; leading axes (B, chunks) or (B,).
Apply = Callable[[Any, Any, Bool[Array, "*leading"] | None], Any]

# Up to this many summaries, applying them one after the other is faster than a tree.
_FEW = 4


def states_before(
    join: Join, apply: Apply, state: Any, summaries: Any, keeps: Bool[Array, "B chunks"] | None
) -> tuple[Any, Any]:
    """The states before each of the chunks, (B, chunks, ...), and the state after the last.

    Each level of the recursion joins pairs of neighbours. The first chunk of a pair finds its state in the level
    above, and the second one step later. Unlike `lax.associative_scan`, no chunk is joined with all chunks before
    it, because a state may be smaller than a summary.

    Args:
      state: the state before the first chunk.
      summaries: a pytree of arrays (B, chunks, ...).
      keeps: False where a new segment begins in a chunk, which drops the state before it; None means True everywhere.
    """

    chunks = jax.tree.leaves(summaries)[0].shape[1]
    if chunks <= _FEW:
        reached = [state]
        for i in range(chunks):
            reached.append(apply(reached[-1], *_one(i, summaries, keeps)))
        return jax.tree.map(lambda *x: jnp.stack(x, axis=1), *reached[:-1]), reached[-1]

    pairs = chunks // 2
    first, first_keeps = jax.tree.map(lambda x: x[:, 0 : 2 * pairs : 2], (summaries, keeps))
    second, second_keeps = jax.tree.map(lambda x: x[:, 1::2], (summaries, keeps))
    both_keep = None if first_keeps is None else first_keeps & second_keeps
    states, state = states_before(join, apply, state, join(first, second, second_keeps), both_keep)
    between = apply(states, first, first_keeps)

    def interleave(x: Array, y: Array) -> Array:
        return jnp.stack([x, y], axis=2).reshape(x.shape[0], 2 * pairs, *x.shape[2:])

    states = jax.tree.map(interleave, states, between)
    if chunks % 2:
        states = jax.tree.map(lambda x, y: jnp.concatenate([x, y[:, None]], axis=1), states, state)
        state = apply(state, *_one(chunks - 1, summaries, keeps))
    return states, state


def joined(join: Join, summaries: Any, keeps: Bool[Array, "B chunks"] | None) -> Any:
    """The summary of all chunks, from pytrees (B, chunks, ...), in a logarithmic number of steps."""
    chunks = jax.tree.leaves(summaries)[0].shape[1]
    while chunks > 1:
        pairs = chunks // 2
        first = jax.tree.map(lambda x: x[:, 0 : 2 * pairs : 2], (summaries, keeps))  # noqa: B023
        second = jax.tree.map(lambda x: x[:, 1 : 2 * pairs : 2], (summaries, keeps))  # noqa: B023
        both = join(first[0], second[0], second[1])
        both_keep = None if keeps is None else first[1] & second[1]
        left = jax.tree.map(lambda x: x[:, 2 * pairs :], (summaries, keeps))  # noqa: B023
        summaries, keeps = jax.tree.map(lambda x, y: jnp.concatenate([x, y], axis=1), (both, both_keep), left)
        chunks -= pairs
    return jax.tree.map(lambda x: x[:, 0], summaries)


def _one(i: int, summaries: Any, keeps: Any) -> Any:
    """One chunk's summary and what it keeps."""
    return jax.tree.map(lambda x: x[:, i], (summaries, keeps))
