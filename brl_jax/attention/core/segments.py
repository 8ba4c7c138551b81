"""Where the sequences of a packed row begin."""

from __future__ import annotations

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Int


def run_numbers(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """Numbers the sequences of each row from 0. A sequence is a run of equal ids."""
    changes = jnp.cumsum(segment_ids[:, 1:] != segment_ids[:, :-1], axis=1, dtype=jnp.int32)
    return jnp.zeros(segment_ids.shape, jnp.int32).at[:, 1:].set(changes)


def first_tokens(segment_ids: Int[Array, "*B T"]) -> Int[Array, "*B T"]:
    """For each token, the index of the first token of its sequence. A sequence is a run of equal ids."""
    places = jnp.broadcast_to(jnp.arange(segment_ids.shape[-1], dtype=jnp.int32), segment_ids.shape)
    begins = segment_ids[..., 1:] != segment_ids[..., :-1]
    begins = jnp.concatenate([jnp.ones_like(begins, shape=(*begins.shape[:-1], 1)), begins], axis=-1)
    return lax.associative_scan(jnp.maximum, jnp.where(begins, places, 0), axis=begins.ndim - 1)


def places_in_sequences(segment_ids: Int[Array, "B T"]) -> Int[Array, "B T"]:
    """For each token, its index in its sequence. A sequence is a run of equal ids."""
    return jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None] - first_tokens(segment_ids)
