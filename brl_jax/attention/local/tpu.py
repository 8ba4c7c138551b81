"""Local attention on TPU: how each pattern becomes one or two calls of the Pallas kernels.

Sliding windows have a kernel of their own. Other patterns are listed: for each block of queries the blocks of keys
that its parts (`Pattern.parts`) reach, with masks from positions inside. Patterns that see every so-manieth key are
brought into an order in which what is seen lies together; where two calls share the work, their softmaxes are merged
by their log-sum-exp.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.arguments import zero_padding
from brl_jax.attention.core.softmax import merge_sums, normalise, sums_of_normalised
from brl_jax.attention.local.blocks import Inputs, Spec
from brl_jax.attention.local.parts import Call
from brl_jax.attention.local.patterns import BlockDiagonal, Dilated, Fixed, Pattern, SlidingWindow, Strided
from pallas_kernels import tpu
from pallas_kernels.absent import mark_absent
from pallas_kernels.positions import floor_divide

#: Queries whose scores the kernels compute together; key blocks are no smaller.
_TILE = 128


class _Arrays(NamedTuple):
    """One call's arrays; query i stands at key index i + query_offset."""

    query: Float[Array, "B T N H"]
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]
    query_offset: int
    lengths: tuple[Array | None, Array | None]  # of queries and keys, (B,)
    segments: tuple[Array | None, Array | None]  # (B, T) and (B, S), both or neither


_Result = tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]


@dataclasses.dataclass(frozen=True)
class _Kernels:
    """The kernels with the options that all calls for one pattern share."""

    is_causal: bool
    scale: float
    interpret: bool

    def window(self, x: _Arrays, left: int, right: int) -> _Result:
        """A sliding window by its own kernel where that serves it, else by lists of blocks."""
        right = 0 if self.is_causal else right
        same = x.query.shape[1] == x.key.shape[1] and x.query_offset == 0
        if not same or tpu.window_obstacle(x.query, x.key, x.value, left=left, right=right):
            return self.pattern(x, SlidingWindow(left, right), 0, None)
        out, log_sum = tpu.window_attention(
            x.query, x.key, x.value, left=left, right=right, **self._shared(x)
        )
        return out, log_sum

    def pattern(
        self, x: _Arrays, pattern: Pattern, key_offset: int | None, shift: Int[Array, ""] | None
    ) -> _Result:
        """A pattern whose parts keep the sequence's order. `shift` is the key offset where that is traced."""
        num_queries, num_keys = x.query.shape[1], x.key.shape[1]
        call = Call(num_queries, num_keys, x.query_offset, key_offset, self.is_causal, lambda width: _TILE)
        rectangles = (r for part in pattern.parts(call) for r in part.rectangles())
        size = _block_size(pattern, num_queries)
        position = 0 if key_offset is None else key_offset
        first = x.query_offset + position
        lists = _lists(rectangles, call, size)
        options: dict[str, Any] = {}
        if pattern.granule is None:
            options["mask"] = self._cut(pattern.visible)
        else:
            options["mask"] = self._cut(None)
            if pattern.granule % size or first % size or position % size:
                options["granules"] = _granules(pattern, lists, size, call, first, position)
        return self.blocks(
            x, lists, size, query_position=first, key_position=position, shift=shift, **options
        )

    def blocks(self, x: _Arrays, lists: list[list[int]], size: int, **options: Any) -> _Result:
        options |= {"key_blocks": lists, "block_q": size, "block_k": size}
        out, log_sum = tpu.block_attention(x.query, x.key, x.value, **options, **self._shared(x))
        return out, log_sum

    def _cut(self, visible: Callable | None) -> Callable | None:
        """A rule with the keys after the query cut, if they are to be."""
        if not self.is_causal:
            return visible
        if visible is None:
            return lambda queries, keys: keys <= queries
        return lambda queries, keys: visible(queries, keys) & (keys <= queries)

    def _shared(self, x: _Arrays) -> dict[str, Any]:
        return {
            "scale": self.scale,
            "query_segment_ids": x.segments[0],
            "key_segment_ids": x.segments[1],
            "query_lengths": x.lengths[0],
            "key_lengths": x.lengths[1],
            "return_log_sum_exp": True,
            "interpret": self.interpret,
        }


def attend(
    spec: Spec,
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    inputs: Inputs,
    *,
    interpret: bool,
) -> Float[Array, "B T N H"]:
    """`local_attention` without a bias, on the kernels."""
    x = _Arrays(
        query,
        key,
        value,
        spec.query_offset,
        (inputs.query_lengths, inputs.key_lengths),
        (inputs.query_segments, inputs.key_segments),
    )
    kernels = _Kernels(spec.is_causal, spec.scale, interpret)
    match spec.pattern:
        case SlidingWindow(left, right):
            return kernels.window(x, left, right)[0]
        case Dilated(left, right, dilation):
            return _unfold(kernels.window(_fold(x, dilation), left, right)[0], dilation, x)
        case Strided(stride):
            near = kernels.window(x, stride, stride)
            return _merge(near, [_unfold(y, stride, x) for y in _far_columns(kernels, _fold(x, stride))])
        case Fixed(stride, summary) if spec.key_offset is not None:
            near = kernels.pattern(x, BlockDiagonal(stride), spec.key_offset, None)
            return _merge(near, _far_summaries(kernels, x, stride, summary, spec.key_offset))
    return kernels.pattern(x, spec.pattern, spec.key_offset, inputs.key_offset)[0]


def _block_size(pattern: Pattern, num_queries: int) -> int:
    """Rows of a block: smaller ones compute less that nobody sees, larger ones take fewer steps."""
    if pattern.granule is not None:
        size = math.gcd(pattern.granule, 512)
        return size if size >= _TILE else _TILE
    reach = max(pattern.lookback or 0, pattern.lookahead or 0) or 256
    size = _TILE if reach < 128 else 256 if reach < 512 else 512
    return min(size, -(-num_queries // _TILE) * _TILE)


def _lists(rectangles: Iterable[tuple[int, int, int, int]], call: Call, size: int) -> list[list[int]]:
    """For each block of queries the blocks of keys that the rectangles touch, less those after it if causal."""
    lists: list[set[int]] = [set() for _ in range(-(-call.num_queries // size))]
    for first_query, stop_query, first_key, stop_key in rectangles:
        first_key, stop_key = max(first_key, 0), min(stop_key, call.num_keys)
        first_query, stop_query = max(first_query, 0), min(stop_query, call.num_queries)
        if first_key < stop_key and first_query < stop_query:
            for row in range(first_query // size, (stop_query - 1) // size + 1):
                lists[row].update(range(first_key // size, (stop_key - 1) // size + 1))
    stops = [min((row + 1) * size, call.num_queries) + call.query_offset for row in range(len(lists))]
    return [
        sorted(k for k in keys if not call.is_causal or k * size < stop) for keys, stop in zip(lists, stops)
    ]


def _granules(
    pattern: Pattern, lists: list[list[int]], size: int, call: Call, first_query: int, first_key: int
) -> tpu.Granules:
    """What a pattern that can only be looked up says of each listed pair of blocks."""
    granule = pattern.granule
    assert granule is not None
    positions = max(first_key + call.num_keys, first_query + call.num_queries)
    count = tpu.Granules.touched(size, granule)

    def touched(first: int, blocks: list[int]) -> np.ndarray:
        """A position in each granule of each block; those past the end are never asked for."""
        number = (first + np.asarray(blocks, np.int64)[:, None] * size) // granule + np.arange(count)
        return np.minimum(number * granule, positions - 1)

    bits = []
    for row, keys in enumerate(lists):
        seen = pattern.visible(
            touched(first_query, [row])[:, :, None], touched(first_key, keys)[:, None, :], positions
        )
        packed = np.packbits(np.asarray(seen).reshape(len(keys), -1), axis=1, bitorder="little")
        bits.append(tuple(int.from_bytes(row.tobytes(), "little") for row in packed))
    return tpu.Granules(granule, tuple(bits))


def _dense(num_queries: int, num_keys: int, size: int, visible: Callable[[int], int]) -> list[list[int]]:
    """Lists in which a block of queries meets the keys before `visible` of its last query's index."""
    lists = []
    for row in range(-(-num_queries // size)):
        stop = min(visible(min((row + 1) * size, num_queries) - 1), num_keys)
        lists.append(list(range(-(-max(stop, 0) // size))))
    return lists


def _far_columns(kernels: _Kernels, folded: _Arrays) -> _Result:
    """Strided's keys a multiple of the stride away, beyond the window: all of the same phase but three."""
    num_queries, num_keys = folded.query.shape[1], folded.key.shape[1]
    size = _block_size(Strided(1), num_queries)

    def rule(queries, keys):
        return (keys < queries - 1) if kernels.is_causal else (abs(keys - queries) > 1)

    offset = folded.query_offset
    stop = (lambda last: last + offset - 1) if kernels.is_causal else (lambda last: num_keys)
    lists = _dense(num_queries, num_keys, size, stop)
    return kernels.blocks(folded, lists, size, mask=rule, query_position=offset)


def _far_summaries(kernels: _Kernels, x: _Arrays, stride: int, summary: int, key_offset: int) -> _Result:
    """Fixed's last positions of every block but the query's own."""
    front = key_offset % stride
    padded = _with_absent(x, (0, 0), (front, -(front + x.key.shape[1]) % stride))
    first_block = key_offset // stride

    def summaries(y):
        y = y.reshape(y.shape[0], -1, stride, *y.shape[2:])[:, :, stride - summary :]
        return y.reshape(y.shape[0], -1, *y.shape[3:])

    query_ids, key_ids = padded.segments
    far = padded._replace(
        key=summaries(padded.key),
        value=summaries(padded.value),
        segments=(query_ids, None if key_ids is None else summaries(key_ids)),
    )
    first = x.query_offset + key_offset
    num_queries, num_keys = far.query.shape[1], far.key.shape[1]
    size = _block_size(Strided(1), num_queries)

    def rule(queries, keys):
        query_block, key_block = floor_divide(queries, stride), floor_divide(keys, summary) + first_block
        return (key_block < query_block) if kernels.is_causal else (key_block != query_block)

    def stop(last):
        return ((last + first) // stride - first_block) * summary if kernels.is_causal else num_keys

    lists = _dense(num_queries, num_keys, size, stop)
    return kernels.blocks(far, lists, size, mask=rule, query_position=first)


def _pad(x: Array, pad: tuple[int, int]) -> Array:
    """Zeros before and after the tokens of x (B, T, ...)."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (*pad, 0), *[(0, 0, 0)] * (x.ndim - 2)])


def _exists(x: Array, lengths: Array | None) -> Bool[Array, "#B T"]:
    """Which tokens of x (B, T, ...) exist."""
    if lengths is None:
        return jnp.ones((1, x.shape[1]), bool)
    return jnp.arange(x.shape[1], dtype=jnp.int32)[None, :] < lengths[:, None]


def _with_absent(x: _Arrays, query_pad: tuple[int, int], key_pad: tuple[int, int]) -> _Arrays:
    """The call with absent tokens before and after its own, and with lengths expressed as segment ids."""
    batch = x.query.shape[0]
    query, key, value = (
        _pad(zero_padding(y, lengths), pad)
        for y, lengths, pad in (
            (x.query, x.lengths[0], query_pad),
            (x.key, x.lengths[1], key_pad),
            (x.value, x.lengths[1], key_pad),
        )
    )
    query_ids, key_ids = (
        None if ids is None else _pad(ids, pad) for ids, pad in zip(x.segments, (query_pad, key_pad))
    )
    # An absent query needs no mark: its result is dropped.
    if any(key_pad) or any(y is not None for y in (*x.segments, *x.lengths)):
        query_ids, key_ids = mark_absent(
            query_ids,
            key_ids,
            _pad(_exists(x.query, x.lengths[0]), query_pad),
            _pad(_exists(x.key, x.lengths[1]), key_pad),
            batch,
        )
    return _Arrays(query, key, value, x.query_offset, (None, None), (query_ids, key_ids))


def _fold(x: _Arrays, period: int) -> _Arrays:
    """The tokens a multiple of the period apart as sequences of their own, beside each other in the batch."""

    def fold(y):
        y = jnp.moveaxis(y.reshape(y.shape[0], -1, period, *y.shape[2:]), 2, 1)
        return y.reshape(-1, *y.shape[2:])

    front = x.query_offset % period
    query_pad, key_pad = (front, -(front + x.query.shape[1]) % period), (0, -x.key.shape[1] % period)
    padded = _with_absent(x, query_pad, key_pad)
    query_ids, key_ids = padded.segments
    return padded._replace(
        query=fold(padded.query),
        key=fold(padded.key),
        value=fold(padded.value),
        query_offset=x.query_offset // period,
        segments=(None if query_ids is None else fold(query_ids), None if key_ids is None else fold(key_ids)),
    )


def _unfold(y: Array, period: int, x: _Arrays) -> Array:
    """Undoes `_fold` for what has one entry a query."""
    y = jnp.moveaxis(y.reshape(-1, period, *y.shape[1:]), 1, 2)
    y = y.reshape(y.shape[0], -1, *y.shape[3:])
    return lax.slice_in_dim(y, x.query_offset % period, x.query_offset % period + x.query.shape[1], axis=1)


def _merge(near: _Result, far: Iterable[Array]) -> Float[Array, "B T N H"]:
    """Softmax over the keys of both, from each one's output and log-sum-exp."""
    out, _ = normalise(merge_sums(sums_of_normalised(*near), sums_of_normalised(*far)))
    return out.astype(near[0].dtype)
