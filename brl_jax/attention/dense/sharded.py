"""Full and Hopfield attention over sequences that are sharded over a mesh axis; to be called inside `jax.shard_map`.

Each device has one of n equal shards of every sequence, in the order of the axis. It computes its own queries while
keys and values travel around the devices (ring attention, Liu et al. 2023, arXiv:2310.01889). No device ever holds the
keys of a whole sequence, not even in the backward pass.

Causal attention is balanced. Otherwise the device with the last tokens would see far more keys than the first. Each
shard is cut into halves, and device i from the start exchanges its second half with device i from the end, so that each
device has an early half, which sees few keys, and a late half, which sees many. Every later round pairs two halves of
queries with two halves of keys, and exactly two of the four pairs are fully visible, on every device. Compare the
zigzag order of Llama 3 (Dubey et al. 2024, arXiv:2407.21783, section 3.3.2) and striped attention (Brandon et al. 2023,
arXiv:2311.09431).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import (
    check_dtypes,
    check_lengths,
    check_qkv,
    check_scale,
    check_segments,
    check_sinks,
)
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.on_mesh import Cut, absent
from brl_jax.attention.core.softmax import (
    SoftmaxSums,
    add_sinks,
    empty_sums,
    merge_sums,
    normalise,
    sums_of_normalised,
)
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.dense.attend import MANY_TOKENS, attend
from brl_jax.attention.dense.full_xla import FullArrays
from brl_jax.fields import Positive
from brl_jax.sharding import sequence_axis


def full_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    *,
    axis_name: str,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    sinks: Float[Array, " N"] | None = None,
    logits_soft_cap: Positive | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """`brl_jax.full_attention` of shards, T queries and S keys per device; if is_causal, T = S and even. Lengths are of
    the whole sequences. "cudnn" returns no log-sum-exp.

    Memory is O(T + S) for this device's tokens. Each of n devices sends keys and values n - 1 times while it computes.
    The backward pass computes the scores twice, and sends keys and values together with their gradients.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0])
    query_ids, key_ids = check_segments(segment_ids, query.shape, key.shape)
    sinks, cap = check_sinks(sinks, query.shape[2]), logits_soft_cap and float(logits_soft_cap)
    ring = Ring(axis_name, is_causal)
    pair = _FullPair(check_scale(scale, query.shape[3]), cap, implementation)
    out, log_sums = attend_around(ring, pair, query, key, value, (query_ids, key_ids), lengths)
    if sinks is not None:
        factor, _ = add_sinks(log_sums, jnp.broadcast_to(sinks.astype(jnp.float32), log_sums.shape))
        out = out * factor[..., None]
    return ring.collect(out.astype(query.dtype))


def hopfield_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    *,
    steps: int = 1,
    **options: Any,
) -> Float[Array, "B T N H"]:
    """`brl_jax.hopfield_attention` of shards: this module's `full_attention`, once for each step."""
    for _ in range(steps - 1):
        query = full_attention(query, key, key, **options)
    return full_attention(query, key, value, **options)


def cut(around: Callable[..., Array], function: Callable[..., Array], **arguments: Any) -> Cut | None:
    """The rule of `full_attention` and `hopfield_attention`; `around` is this module's function.

    If rows are cut, the keys travel around the devices, with causal work balanced. With a bias, a mask or an offset,
    each device gathers all keys of its rows instead. The compiler divides calls with few tokens and calls to cuDNN.
    """
    implementation, ids = arguments["implementation"], arguments["segment_ids"]
    length, keys = arguments["query"].shape[1], arguments["key"].shape[1]
    many = implementation in (None, "xla") and min(length, keys) >= MANY_TOKENS
    if not many and implementation not in ("pallas", "pallas_interpret"):
        return None
    axis = sequence_axis(length)
    if axis is None:
        return Cut()
    fits = (
        sequence_axis(keys)
        if not arguments["is_causal"]
        else length == keys and sequence_axis(length, block=2)
    )
    if fits and absent(arguments, "bias", "mask", "query_seq_lengths", "query_offset", "return_residual"):
        return Cut({"T": "length", "S": "length"}, run=functools.partial(around, axis_name=axis))
    pair = ids if ids is None or isinstance(ids, tuple | list) else (ids, ids)
    return Cut({"T": "length"}, {"segment_ids": pair}, functools.partial(_read_all, axis, function))


def _read_all(axis: str, function: Callable[..., Any], **arguments: Any) -> Any:
    first = jnp.int32(arguments["query"].shape[1]) * lax.axis_index(axis)
    lengths = arguments.get("query_seq_lengths")
    if lengths is not None:
        arguments["query_seq_lengths"] = jnp.maximum(lengths - first.astype(lengths.dtype), 0)
    return function(**arguments | {"query_offset": arguments.get("query_offset", 0) + first})


def attend_around(
    ring: Ring,
    pair: Pair,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    ids: tuple[Any, Any],
    lengths: Int[Array, " B"] | None,
) -> tuple[Float[Array, "P B t N V"], Float[Array, "P B t N"]]:
    """Outputs and log-sum-exp, in float32, of this device's queries over the keys of all devices.

    Args:
      pair: the attention between two parts.
      ids: the segments of queries and of keys, or a pair of None.
      lengths: of the whole rows.

    Returns:
      This device's parts; `ring.collect` joins them to a shard.
    """
    query, shard, query_ids, lengths = ring.parts(query, key, value, ids, lengths)
    return _attend(ring, pair, query, shard, query_ids, lengths)


class Place(NamedTuple):
    """Where two parts are that meet.

    Attributes:
      same: whether queries and keys are the same part. A causal call masks later keys only then.
      query, key: the index of each part's first token in the row.
    """

    same: bool
    query: Int[Array, ""]
    key: Int[Array, ""]


@runtime_checkable  # the tests check types at every call
class Pair(Protocol):
    """The attention of one part of the queries to one part of the keys. It is static, so it has no arrays."""

    def __call__(
        self, query: Array, key: Array, value: Array, ids: tuple, lengths: Any, is_causal: bool, place: Place
    ) -> tuple[Float[Array, "B t N V"], Float[Array, "B t N"]]:
        """The output and the float32 log-sum-exp; `lengths` count within the part of the keys."""


class _FullPair(NamedTuple):
    """The `Pair` of `full_attention`."""

    scale: float
    cap: float | None
    implementation: Implementation | None

    def __call__(
        self, query: Array, key: Array, value: Array, ids: tuple, lengths: Any, is_causal: bool, place: Place
    ) -> tuple[Array, Array]:
        return attend(
            FullArrays(query, key, value, key_lengths=lengths, segments=ids),
            implementation=self.implementation,
            scale=self.scale,
            is_causal=is_causal,
            cap=self.cap,
            return_residual=True,
        )


class Shard(NamedTuple):
    """The keys that a device holds in a round, as P parts of equal length: (P, B, S/P, ...)."""

    key: Float[Array, "P B s K H"]
    value: Float[Array, "P B s K V"]
    ids: Int[Array, "P B s"] | None


class Ring(NamedTuple):
    """The static side of a call. A device has two parts in a causal call, and one otherwise."""

    axis: str
    is_causal: bool

    def parts(
        self, query: Array, key: Array, value: Array, ids: tuple[Any, Any], lengths: Any = None
    ) -> tuple[Array, Shard, Array | None, Array | None]:
        """Spreads the queries, keys and segments of this device's shard into parts; lengths are of whole rows."""
        arrays = (query, key, value, *ids, lengths)
        query, key, value, *more, lengths = vary_like(arrays, (*arrays, lax.axis_index(self.axis)))
        query_ids, key_ids = (None if x is None else self.spread(x) for x in more)
        return self.spread(query), Shard(self.spread(key), self.spread(value), key_ids), query_ids, lengths

    def spread(self, x: Array) -> Array:
        """Turns an array (B, T, ...) of this device's shard into its parts (P, B, T/P, ...)."""
        if not self.is_causal:
            return x[None]
        half = x.shape[1] // 2
        return jnp.stack([x[:, :half], self._mirrored(x[:, half:])])

    def collect(self, x: Array) -> Array:
        """Undoes `spread`."""
        return jnp.concatenate([x[0], self._mirrored(x[1])], axis=1) if self.is_causal else x[0]

    def _mirrored(self, x: Array) -> Array:
        """x from the mirrored device: device i from the end, for device i from the start."""
        last = lax.axis_size(self.axis) - 1
        return lax.ppermute(x, self.axis, [(i, last - i) for i in range(last + 1)])

    def pass_on(self, tree: Any) -> Any:
        """Sends arrays to the next device, and returns the previous device's."""
        size = lax.axis_size(self.axis)
        return jax.tree.map(
            lambda x: lax.ppermute(x, self.axis, [(i, (i + 1) % size) for i in range(size)]), tree
        )

    def around(self, visit: Callable[[Any, Any, Any], Any], state: Any, shard: Shard) -> Any:
        """Runs state = visit(state, shard, round) for the shards of all devices; this one's is in round 0."""
        size = lax.axis_size(self.axis)
        # The next shard travels while this one is in use.
        state, shard = visit(state, shard, 0), self.pass_on(shard) if size > 1 else shard
        if size == 1:
            return state

        def body(carry, number):
            state, shard = carry
            return (visit(state, shard, number), self.pass_on(shard)), None

        (state, shard), _ = lax.scan(body, (state, shard), jnp.arange(1, size - 1, dtype=jnp.int32))
        return visit(state, shard, jnp.int32(size - 1))

    def gradients(
        self, query: Array, shard: Shard, pulled: Callable[..., tuple[Array, Array, Array]]
    ) -> tuple[Array, Shard]:
        """The gradients of this device's queries and keys, in their dtypes.

        pulled(shard, part of queries, part of keys, round, whether they are the same) returns the gradients of the
        queries, keys and values of two parts that meet.
        """

        def visit(state: tuple[Array, Array, Array], shard: Shard, number: Any):
            d_query, *d_shard = state
            # The gradients of keys and values travel with them.
            d_shard = d_shard if isinstance(number, int) else self.pass_on(d_shard)
            for own, other, same in self.pairs(number):
                gradients = pulled(shard, own, other, number, same)
                d_query = d_query.at[own].add(gradients[0].astype(jnp.float32))
                d_shard = [x.at[other].add(d.astype(jnp.float32)) for x, d in zip(d_shard, gradients[1:])]
            return d_query, *d_shard

        zeros = [
            vary_like(jnp.zeros(x.shape, jnp.float32), (query, shard))
            for x in (query, shard.key, shard.value)
        ]
        d_query, *d_shard = self.around(visit, tuple(zeros), shard)
        d_key, d_value = self.pass_on(d_shard)
        d_shard = Shard(d_key.astype(shard.key.dtype), d_value.astype(shard.value.dtype), None)
        return d_query.astype(query.dtype), d_shard

    def pairs(self, number: Any) -> list[tuple[Any, Any, bool]]:
        """The pairs that meet in a round: (part of queries, part of keys, whether they are the same)."""
        if not self.is_causal:
            return [(0, 0, isinstance(number, int))]
        size, here = lax.axis_size(self.axis), lax.axis_index(self.axis)
        there = lax.rem(here + size - number, jnp.int32(size))
        # Device i has the parts 2 i and 2 n - 1 - 2 i. A first part sees another's second part if that is earlier.
        second_sees = (here + there < size).astype(jnp.int32)
        across = (second_sees, 1 - second_sees, False)
        if isinstance(number, int):  # round 0
            return [(0, 0, True), (1, 1, True), across]
        same = (there > here).astype(jnp.int32)
        return [(same, same, False), across]

    def first_token(self, part: Any, number: Any, size: int) -> Array:
        """The index in the row of the first token of a part of `size` tokens that arrived in this round."""
        devices = lax.axis_size(self.axis)
        there = lax.rem(lax.axis_index(self.axis) + devices - number, jnp.int32(devices))
        if not self.is_causal:
            return there * size
        # After the exchange of halves, device i has the parts 2 i and 2 n - 1 - 2 i of 2 n.
        return jnp.where(part == 0, 2 * there, 2 * devices - 1 - 2 * there) * size


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(
    ring: Ring, pair: Pair, query: Float[Array, "P B t N H"], shard: Shard, query_ids: Any, lengths: Any
) -> tuple[Float[Array, "P B t N V"], Float[Array, "P B t N"]]:
    """Output and log-sum-exp in float32."""

    def visit(sums: SoftmaxSums, shard: Shard, number: Any) -> SoftmaxSums:
        for own, other, same in ring.pairs(number):
            operands, meet = _meeting(ring, pair, query, shard, query_ids, lengths, own, other, number, same)
            part = sums_of_normalised(*meet(*operands))
            merged = merge_sums(jax.tree.map(lambda x, own=own: x[own], sums), part)
            sums = jax.tree.map(lambda x, new, own=own: x.at[own].set(new), sums, merged)
        return sums

    empty = vary_like(empty_sums(query.shape[:4], shard.value.shape[4]), (query, shard))
    return normalise(ring.around(visit, empty, shard))


def _attend_forward(ring: Ring, pair: Pair, query: Array, shard: Shard, query_ids: Any, lengths: Any):
    result = _attend(ring, pair, query, shard, query_ids, lengths)
    return result, (query, shard, query_ids, lengths, *result)


def _attend_backward(ring: Ring, pair: Pair, residuals: Any, grads: tuple[Array, Array]):
    query, shard, query_ids, lengths, out, log_sums = residuals
    d_out, d_log_sums = grads
    # The gradient of a key's score is its weight times (d_out . value - mean).
    mean = jnp.sum(d_out * out, -1) - d_log_sums

    def pulled(shard: Shard, own: Any, other: Any, number: Any, same: bool) -> tuple[Array, Array, Array]:
        operands, meet = _meeting(ring, pair, query, shard, query_ids, lengths, own, other, number, same)
        (part, part_sums), pull = jax.vjp(meet, *operands)
        share = jnp.exp(part_sums - log_sums[own])
        d_part = share[..., None] * d_out[own]
        d_part_sums = share * (jnp.sum(d_out[own] * part.astype(jnp.float32), -1) - mean[own])
        # If a query sees no key of the part, its sum is -inf, and -inf times a gradient of 0 would be NaN.
        d_part_sums = jnp.where(jnp.isfinite(part_sums), d_part_sums, 0.0)
        return pull((d_part.astype(part.dtype), d_part_sums))

    return *ring.gradients(query, shard, pulled), None, None


_attend.defvjp(_attend_forward, _attend_backward)


def _meeting(
    ring: Ring,
    pair: Pair,
    query: Array,
    shard: Shard,
    query_ids: Any,
    lengths: Any,
    own: Any,
    other: Any,
    number: Any,
    same: bool,
) -> tuple[tuple[Array, Array, Array], Callable[..., tuple[Array, Array]]]:
    """The queries, keys and values of two parts that meet, and the function that attends."""
    ids = (None, None) if shard.ids is None else (query_ids[own], shard.ids[other])
    size = shard.key.shape[2]
    first = ring.first_token(other, number, size)
    meet = functools.partial(
        pair,
        ids=ids,
        lengths=None if lengths is None else jnp.clip(lengths - first, 0, size),
        is_causal=ring.is_causal and same,
        place=Place(same, ring.first_token(own, 0, query.shape[2]), first),
    )
    return (query[own], shard.key[other], shard.value[other]), meet
