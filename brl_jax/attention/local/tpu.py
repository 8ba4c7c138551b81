"""Local attention on TPU: how each pattern becomes one or two launches of the Pallas kernels.

Sliding windows use the window kernel. Other patterns use the block kernel, which gets a list of key blocks for each
block of queries (from `Pattern.parts`) and computes masks from positions. If a pattern sees every d-th key, tokens are
rearranged first so that the visible keys are contiguous. Two launches are merged by their log-sum-exps.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

import pallas_kernels as kernels
from brl_jax.attention.core import tpu_biases
from brl_jax.attention.core.softmax import gradient_of_kernel, merge_kernels
from brl_jax.attention.local.far_patterns import Axial, Fixed, Strided
from brl_jax.attention.local.patterns import (
    BlockDiagonal,
    CallArrays,
    Dilated,
    Pattern,
    PatternCall,
    SlidingWindow,
)
from pallas_kernels.absent import existing, mark_absent
from pallas_kernels.positions import floor_divide

#: Queries whose scores the kernels compute together, and the smallest block of keys.
_TILE = 128
# The smallest blocks of positions whose visibility the kernels can look up.
_MIN_GRANULE = 8

_Result = tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]


def unsupported(call: PatternCall, x: CallArrays) -> str | None:
    """Why the kernels do not support a call, or None. Traces nothing."""
    pattern, bias = call.pattern, x.bias
    if (why := tpu_biases.unsupported(bias)) is not None:
        return why
    if bias is not None and isinstance(pattern, Fixed) and call.key_offset is not None:
        return f"bias must be None with Fixed, got {type(bias).__name__}"
    if pattern.granule is not None:
        name = type(pattern).__name__
        if pattern.granule < _MIN_GRANULE:
            return f"blocks of {name} must hold at least {_MIN_GRANULE} positions, got {pattern.granule}"
        if call.key_offset is None:
            return f"key_offset must be a static int with {name}, got a traced one"
    steps = _launches(call, x.query, x.key, bias)
    return next((why for step in steps if (why := step.unsupported(bias))), None)


def attend(call: PatternCall, x: CallArrays, *, interpret: bool) -> tuple[Any, Float[Array, "B N T"]]:
    """Returns the results of `local_attention`, with a float32 residual, and what `gradient` needs: the log-sum-exp of
    the first launch, without sinks."""
    results = [step.run(x, interpret) for step in _launches(call, x.query, x.key, x.bias)]
    out, lse = merge_kernels(x, results)
    return (out, lse) if call.return_residual else out, results[0][1].swapaxes(1, 2)


def gradient(
    call: PatternCall,
    operands: tuple[CallArrays],
    results: Any,
    log_sums: Float[Array, "B N T"],
    d_results: Any,
    *,
    interpret: bool,
) -> tuple[CallArrays]:
    """The gradient of `attend`. Two launches run again; a single one reuses what it returned."""
    (x,) = operands
    launches = _launches(call, x.query, x.key, x.bias)
    if len(launches) > 1:
        return jax.vjp(lambda x: attend(call, x, interpret=interpret)[0], x)[1](d_results)
    run = lambda x, known: launches[0].run(x, interpret, known)  # noqa: E731
    given = (x, results, log_sums, d_results)
    return (gradient_of_kernel(run, *given, return_residual=call.return_residual),)


@dataclasses.dataclass(frozen=True)
class _Launch:
    """One launch of a kernel.

    Attributes:
      tokens: the arrangement of the tokens.
      query, key: shapes and dtypes of the arranged arrays.
      window: whether to use the window kernel instead of the block kernel.
      options: for the kernel.
      shifted: whether to add the call's traced key_offset to all positions.
      reach: how many arranged tokens before and after the query the farthest visible keys are; None for no limit.
    """

    tokens: _Tokens
    query: jax.ShapeDtypeStruct
    key: jax.ShapeDtypeStruct
    window: bool
    options: dict[str, Any]
    shifted: bool = False
    reach: tuple[int | None, int | None] = (None, None)

    def unsupported(self, bias: Any) -> str | None:
        names = ("left", "right") if self.window else ("key_blocks", "block_q", "block_k", "granules")
        options = {name: self.options[name] for name in names if name in self.options}
        function = kernels.tpu.window_unsupported if self.window else kernels.tpu.block_unsupported
        bias = tpu_biases.described(bias, self._distances())
        return function(self.query, self.key, self.key, bias=bias, **options)

    def _distances(self) -> tpu_biases.Distances:
        """The range of distances of all visible pairs."""
        offset, before, after = self.tokens.query_offset, *self.reach
        most, least = self.query.shape[1] - 1 + offset, offset - (self.key.shape[1] - 1)
        most = most if before is None else min(most, before)
        least = least if after is None else max(least, -after)
        return tpu_biases.Distances(
            max(least, 0) if self.tokens.call.is_causal else least, most, self.tokens.step
        )

    def run(self, x: CallArrays, interpret: bool, known: _Result | None = None) -> _Result:
        """Runs the kernel; with `known`, the results of an earlier run, only its backward pass does work."""
        arranged = self.tokens.arrange(x)
        if known is not None:
            known = self.tokens.arrange_rows(known[0]), self.tokens.arrange_rows(known[1])
        options = self.options | ({"shift": x.key_offset} if self.shifted else {})
        if x.bias is not None:
            options["bias"] = tpu_biases.for_kernel(x.bias, x.query.shape[2], self._distances())
        function = kernels.tpu.window_attention if self.window else kernels.tpu.block_attention
        out, log_sum = function(
            arranged.query,
            arranged.key,
            arranged.value,
            scale=self.tokens.call.scale,
            logits_soft_cap=self.tokens.call.logits_soft_cap,
            query_segment_ids=arranged.query_segments,
            key_segment_ids=arranged.key_segments,
            query_lengths=arranged.query_lengths,
            key_lengths=arranged.key_lengths,
            return_log_sum_exp=True,
            known=known,
            interpret=interpret,
            **options,
        )
        return self.tokens.restore(out), self.tokens.restore(log_sum)


def _launches(call: PatternCall, query: Any, key: Any, bias: Any) -> list[_Launch]:
    """The launches of a call, with disjoint keys."""
    tokens = _Tokens(call)
    window = functools.partial(_window, query=query, key=key, bias=bias)
    match call.pattern:
        case SlidingWindow(left, right):
            return [window(tokens, left=left, right=right)]
        case Dilated(left, right, dilation):
            return [window(_Phases(call, dilation), left=left, right=right)]
        case Strided(stride):
            near = window(tokens, left=stride, right=stride)
            return [near, _far_columns(_Phases(call, stride), query, key, beyond=1)]
        case Axial(width) if call.key_offset is not None:
            row = _pattern(tokens, query, key, BlockDiagonal(width), call.key_offset)
            return [row, _far_columns(_Phases(call, width), query, key, beyond=0)]
        case Fixed(stride, summary) if call.key_offset is not None:
            near = _pattern(tokens, query, key, BlockDiagonal(stride), call.key_offset)
            return [near, _far_summaries(call, query, key, stride, summary)]
    return [_pattern(tokens, query, key, call.pattern, call.key_offset)]


# --- Arrangements of tokens ---


@dataclasses.dataclass(frozen=True)
class _Tokens:
    """Tokens in their original order."""

    call: PatternCall

    @property
    def query_offset(self) -> int:
        """Query i of an arranged sequence is at key index i + query_offset."""
        return self.call.query_offset

    @property
    def step(self) -> int:
        """The distance between the original positions of adjacent arranged tokens."""
        return 1

    def shape(self, x: Any, is_query: bool) -> jax.ShapeDtypeStruct:
        """The shape of x, queries or keys, once arranged."""
        return _shape_like(x, x.shape)

    def arrange(self, x: CallArrays) -> CallArrays:
        return x

    def restore(self, y: Array) -> Array:
        """Undoes `arrange` for an array with one entry per query."""
        return y

    def arrange_rows(self, y: Array) -> Array:
        """Undoes `restore`."""
        return y


@dataclasses.dataclass(frozen=True)
class _Phases(_Tokens):
    """Tokens a multiple of the period apart become one sequence; these sequences are stacked along the batch axis."""

    period: int

    @property
    def query_offset(self) -> int:
        return self.call.query_offset // self.period

    @property
    def step(self) -> int:
        return self.period

    @property
    def _query_pad(self) -> tuple[int, int]:
        front = self.call.query_offset % self.period
        return front, -(front + self.call.num_queries) % self.period

    @property
    def _key_pad(self) -> tuple[int, int]:
        return 0, -self.call.num_keys % self.period

    def shape(self, x: Any, is_query: bool) -> jax.ShapeDtypeStruct:
        pad = self._query_pad if is_query else self._key_pad
        length = (x.shape[1] + sum(pad)) // self.period
        return _shape_like(x, (x.shape[0] * self.period, length, *x.shape[2:]))

    def arrange(self, x: CallArrays) -> CallArrays:
        padded = _with_absent(x, self._query_pad, self._key_pad)
        return jax.tree.map(self._fold, padded)

    def _fold(self, y: Array) -> Array:
        y = jnp.moveaxis(y.reshape(y.shape[0], -1, self.period, *y.shape[2:]), 2, 1)
        return y.reshape(-1, *y.shape[2:])

    def arrange_rows(self, y: Array) -> Array:
        return self._fold(_pad(y, self._query_pad))

    def restore(self, y: Array) -> Array:
        y = jnp.moveaxis(y.reshape(-1, self.period, *y.shape[1:]), 1, 2)
        y = y.reshape(y.shape[0], -1, *y.shape[3:])
        front = self._query_pad[0]
        return lax.slice_in_dim(y, front, front + self.call.num_queries, axis=1)


@dataclasses.dataclass(frozen=True)
class _Summaries(_Tokens):
    """Only the last `summary` keys of every block of `stride`; queries in their original order."""

    stride: int
    summary: int

    @property
    def _key_pad(self) -> tuple[int, int]:
        assert self.call.key_offset is not None
        front = self.call.key_offset % self.stride
        return front, -(front + self.call.num_keys) % self.stride

    def shape(self, x: Any, is_query: bool) -> jax.ShapeDtypeStruct:
        if is_query:
            return super().shape(x, is_query)
        length = (x.shape[1] + sum(self._key_pad)) // self.stride * self.summary
        return _shape_like(x, (x.shape[0], length, *x.shape[2:]))

    def arrange(self, x: CallArrays) -> CallArrays:
        def last(y: Array) -> Array:
            y = y.reshape(y.shape[0], -1, self.stride, *y.shape[2:])[:, :, self.stride - self.summary :]
            return y.reshape(y.shape[0], -1, *y.shape[3:])

        padded = _with_absent(x, (0, 0), self._key_pad)
        ids = padded.key_segments
        return padded._replace(
            key=last(padded.key), value=last(padded.value), key_segments=None if ids is None else last(ids)
        )


def _shape_like(x: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    """A shape on the mesh of x. The kernels choose block sizes by the mesh's chip."""
    mesh = jax.typeof(x).sharding.mesh
    sharding = None if mesh.empty else jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    return jax.ShapeDtypeStruct(shape, x.dtype, sharding=sharding)


def _pad(x: Array, pad: tuple[int, int]) -> Array:
    """Adds zeros before and after the tokens of x (B, T, ...)."""
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), (*pad, 0), *[(0, 0, 0)] * (x.ndim - 2)])


def _exists(count: int, lengths: Array | None) -> Bool[Array, "#B T"]:
    """Which of `count` tokens are within the lengths."""
    return jnp.ones((1, count), bool) if lengths is None else existing(lengths, count)


def _with_absent(x: CallArrays, query_pad: tuple[int, int], key_pad: tuple[int, int]) -> CallArrays:
    """Pads the call with absent tokens, and expresses lengths as segment ids."""
    x = x.without_padding()
    query_ids = None if x.query_segments is None else _pad(x.query_segments, query_pad)
    key_ids = None if x.key_segments is None else _pad(x.key_segments, key_pad)
    # Absent queries need no mark, because their results are dropped.
    if any(key_pad) or any(y is not None for y in (query_ids, x.query_lengths, x.key_lengths)):
        query_ids, key_ids = mark_absent(
            query_ids,
            key_ids,
            _pad(_exists(x.query.shape[1], x.query_lengths), query_pad),
            _pad(_exists(x.key.shape[1], x.key_lengths), key_pad),
            x.query.shape[0],
        )
    return CallArrays(
        _pad(x.query, query_pad),
        _pad(x.key, key_pad),
        _pad(x.value, key_pad),
        query_segments=query_ids,
        key_segments=key_ids,
    )


# --- Launches ---


def _window(tokens: _Tokens, query: Any, key: Any, left: int, right: int, bias: Any) -> _Launch:
    """A sliding window on the window kernel if that supports the call, else on the block kernel."""
    right = 0 if tokens.call.is_causal else right
    query_shape, key_shape = tokens.shape(query, True), tokens.shape(key, False)
    if query_shape.shape[1] == key_shape.shape[1] and tokens.query_offset == 0:
        launch = _Launch(
            tokens, query_shape, key_shape, True, {"left": left, "right": right}, reach=(left, right)
        )
        if launch.unsupported(bias) is None:
            return launch
    # A window does not depend on absolute positions.
    return _pattern(tokens, query, key, SlidingWindow(left, right), 0)


def _pattern(tokens: _Tokens, query: Any, key: Any, pattern: Pattern, key_offset: int | None) -> _Launch:
    """A pattern whose parts keep the arranged order, on the block kernel."""
    query_shape, key_shape = tokens.shape(query, True), tokens.shape(key, False)
    call = dataclasses.replace(
        tokens.call,
        pattern=pattern,
        num_queries=query_shape.shape[1],
        num_keys=key_shape.shape[1],
        query_offset=tokens.query_offset,
        key_offset=key_offset,
    )
    rectangles = (r for part in pattern.parts(call, lambda width: _TILE) for r in part.rectangles())
    size = _block_size(pattern, call.num_queries)
    position = 0 if key_offset is None else key_offset
    first = call.query_offset + position
    lists = _lists(rectangles, call, size)
    options: dict[str, Any] = {"query_position": first, "key_position": position}
    if pattern.granule is None:
        options["mask"] = _cut(call, pattern.visible)
    else:
        options["mask"] = _cut(call, None)
        if pattern.granule % size or first % size or position % size:
            options["granules"] = _granules(call, lists, size)
    launch = _listed(tokens, query_shape, key_shape, lists, size, options)
    return dataclasses.replace(launch, shifted=key_offset is None, reach=pattern.limits)


def _listed(
    tokens: _Tokens,
    query: jax.ShapeDtypeStruct,
    key: jax.ShapeDtypeStruct,
    lists: list[list[int]],
    size: int,
    options: dict[str, Any],
) -> _Launch:
    options = options | {"key_blocks": lists, "block_q": size, "block_k": size}
    return _Launch(tokens, query, key, False, options)


def _cut(call: PatternCall, visible: Callable | None) -> Callable | None:
    """A pattern's rule that also hides the keys after the query if the call is causal."""
    if not call.is_causal:
        return visible
    if visible is None:
        return lambda queries, keys: keys <= queries
    return lambda queries, keys: visible(queries, keys) & (keys <= queries)


def _block_size(pattern: Pattern, num_queries: int) -> int:
    """Rows in a block. Smaller blocks compute fewer invisible pairs; larger ones take fewer steps."""
    if pattern.granule is not None:
        size = math.gcd(pattern.granule, 512)
        return size if size >= _TILE else _TILE
    reach = max(limit or 0 for limit in pattern.limits) or 256
    size = _TILE if reach < 128 else 256 if reach < 512 else 512
    return min(size, -(-num_queries // _TILE) * _TILE)


def _lists(rectangles: Iterable[tuple[int, int, int, int]], call: PatternCall, size: int) -> list[list[int]]:
    """The blocks of keys that the rectangles touch, for each block of queries; if causal, only up to the queries."""
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


def _granules(call: PatternCall, lists: list[list[int]], size: int) -> kernels.tpu.Granules:
    """The visibility of each listed pair of blocks, for a pattern that looks it up in a table."""
    pattern, granule, first_key = call.pattern, call.pattern.granule, call.key_offset
    assert granule is not None
    assert first_key is not None
    positions = max(first_key + call.num_keys, call.first_position + call.num_queries)
    count = kernels.tpu.Granules.touched(size, granule)

    def touched(first: int, blocks: list[int]) -> np.ndarray:
        """A position in each granule of each block. Those past the end are never looked up."""
        number = (first + np.asarray(blocks, np.int64)[:, None] * size) // granule + np.arange(count)
        return np.minimum(number * granule, positions - 1)

    bits = []
    for row, keys in enumerate(lists):
        seen = pattern.visible(
            touched(call.first_position, [row])[:, :, None], touched(first_key, keys)[:, None, :], positions
        )
        packed = np.packbits(np.asarray(seen).reshape(len(keys), -1), axis=1, bitorder="little")
        bits.append(tuple(int.from_bytes(row.tobytes(), "little") for row in packed))
    return kernels.tpu.Granules(granule, tuple(bits))


def _dense(num_queries: int, num_keys: int, size: int, visible: Callable[[int], int]) -> list[list[int]]:
    """Lists in which a block of queries visits all keys before `visible(index of its last query)`."""
    lists = []
    for row in range(-(-num_queries // size)):
        stop = min(visible(min((row + 1) * size, num_queries) - 1), num_keys)
        lists.append(list(range(-(-max(stop, 0) // size))))
    return lists


def _far_columns(tokens: _Phases, query: Any, key: Any, *, beyond: int) -> _Launch:
    """The far keys of Strided and Axial, a multiple of the stride away: the whole phase, except the query's own key and
    `beyond` keys on each side of it, which the other launch covers."""
    query, key, call = tokens.shape(query, True), tokens.shape(key, False), tokens.call
    num_keys, size = key.shape[1], _block_size(Strided(1), query.shape[1])

    def rule(queries, keys):
        return (keys < queries - beyond) if call.is_causal else (abs(keys - queries) > beyond)

    offset = tokens.query_offset
    lists = _dense(
        query.shape[1], num_keys, size, lambda last: last + offset - beyond if call.is_causal else num_keys
    )
    return _listed(tokens, query, key, lists, size, {"mask": rule, "query_position": offset})


def _far_summaries(call: PatternCall, query: Any, key: Any, stride: int, summary: int) -> _Launch:
    """The far keys of Fixed: the last keys of every block except the query's own."""
    assert call.key_offset is not None
    tokens = _Summaries(call, stride, summary)
    first, first_block = call.first_position, call.key_offset // stride
    query, key = tokens.shape(query, True), tokens.shape(key, False)
    num_keys, size = key.shape[1], _block_size(Strided(1), query.shape[1])

    def rule(queries, keys):
        query_block, key_block = floor_divide(queries, stride), floor_divide(keys, summary) + first_block
        return (key_block < query_block) if call.is_causal else (key_block != query_block)

    def stop(last):
        return ((last + first) // stride - first_block) * summary if call.is_causal else num_keys

    lists = _dense(query.shape[1], num_keys, size, stop)
    return _listed(tokens, query, key, lists, size, {"mask": rule, "query_position": first})
