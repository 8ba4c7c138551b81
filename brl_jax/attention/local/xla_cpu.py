"""Sliding windows on a CPU: square tiles of scores that stay in cache, several independent blocks a step.

A block of b queries visits T + 1 tiles of b keys. In the first and the last of these, complementary triangles are
visible, so the two are folded into one tile: the softmax runs over T tiles, and only that one is masked.

    keys     tile 0    tile 1 .. T-1    tile T
    query r  c > r       all            c <= r       (a window of T * b keys)

XLA runs independent operations of a loop's body on several cores, but rarely divides products this small. So each step
computes several blocks as independent chains. It reads rows from (B, T, N, H) tile by tile, which avoids transposed
copies of whole arrays. All arithmetic is in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float

from brl_jax.attention.core.checks import starts
from brl_jax.attention.core.products import CACHE_BYTES
from brl_jax.attention.core.scores import soft_cap, soft_cap_slope
from brl_jax.attention.core.softmax import MASKED, SoftmaxSums, finite_maximum, normalise
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.local.patterns import CallArrays, PatternCall, SlidingWindow

_CHAINS = 8
_MOST_BEFORE = 8
# The bytes of one chain's scores: two chains fit into the cache.
_CHAIN_BYTES = CACHE_BYTES // 2


@dataclasses.dataclass(frozen=True)
class WindowTiling:
    """How a call is divided.

    Attributes:
      tile: queries in a block, and keys in a tile.
      before: T, the number of tiles before the last one of a block.
      gap: T * tile minus the window's width: how many keys of the folded tile a query does not see.
      shift: how far the window reaches to the right; tile u starts at key u * tile + shift.
      chains: blocks in a step.
      groups: steps for one sequence and the heads of a step.
      heads: key heads in a step.
    """

    tile: int
    before: int
    gap: int
    shift: int
    chains: int
    groups: int
    heads: int

    @classmethod
    def of(cls, call: PatternCall, query: Array, key: Array) -> WindowTiling | None:
        """None if tiles do not pay off: other patterns, short sequences, windows of many tiles."""
        length, kv_heads = query.shape[1], key.shape[2]
        if not isinstance(call.pattern, SlidingWindow) or call.query_offset != 0 or key.shape[1] != length:
            return None
        left = min(call.pattern.left, length - 1)
        right = 0 if call.is_causal else min(call.pattern.right, length - 1)
        width = left + 1 + right
        tile = 64 if width < 256 else 128 if width <= 512 else 256
        before = -(-width // tile)
        blocks = -(-length // tile)
        if blocks <= before or before > _MOST_BEFORE:
            return None
        one_head = 4 * (query.shape[2] // kv_heads) * (before + 1) * tile**2
        heads = max(
            d
            for d in range(1, kv_heads + 1)
            if kv_heads % d == 0 and (d == 1 or d * one_head <= _CHAIN_BYTES)
        )
        groups = -(-blocks // _CHAINS)
        return cls(tile, before, before * tile - width, right, -(-blocks // groups), groups, heads)

    @property
    def rows(self) -> int:
        """Queries in a step."""
        return self.chains * self.tile

    @property
    def size(self) -> int:
        """Queries, including padding."""
        return self.groups * self.rows

    @property
    def front(self) -> int:
        """Tiles before tile 0 in the arranged keys."""
        return self.before if self.shift else 0

    def visits(self) -> Iterator[tuple[int, slice]]:
        """The chains of a step, and which of the step's tiles of keys each visits."""
        return ((i, slice(i, i + self.before + 1)) for i in range(self.chains))

    def pad_queries(self, x: Array) -> Array:
        return _pad(x, 0, self.size - x.shape[1])

    def pad_keys(self, x: Array) -> Array:
        """Pads keys, or another array with one entry per key on axis 1, to contain every tile within reach."""
        low = self.front * self.tile - self.shift
        return _pad(x, low, self.front * self.tile + self.size - low - x.shape[1])


class Place(NamedTuple):
    """The place of one block of queries, for the key heads of a step."""

    sequence: Array
    head: Array  # the first of the key heads
    block: Array


class Chain(NamedTuple):
    """One block of queries and its tiles of scores, with the first and the last folded into one."""

    query: Array  # (k, G * b, H), scaled
    scores: list[Array]  # (k, G, b, b) each
    offsets: list[Array | None]  # () or None: added to all scores of a tile
    low: Array  # (b, b): which of the folded scores belong to the last tile


def forward(tiling: WindowTiling, call: PatternCall, x: CallArrays):
    """out (B, T, N, H) in float32 and log-sum-exp (B, K, G, T), as `normalise` returns it."""
    query, key, value = x.query, x.key, x.value
    walk = _Walk.of(tiling, call, x)
    q, k, v = tiling.pad_queries(query), tiling.pad_keys(key), tiling.pad_keys(value)

    @jax.jit  # chains are alike: they are traced and lowered once
    def attend(results: tuple[Array, Array], place: Place, keys: Sequence[Array], values: Sequence[Array]):
        chain = walk.chain(place, walk.query_tile(q, place), keys)
        out_tile, lse_tile = _softmax(chain, values)
        return walk.put_rows(results[0], place, out_tile), walk.put_lse(results[1], place, lse_tile)

    def run(results: tuple[Array, Array], number: Array):
        first = walk.place(number)
        keys, values = walk.key_tiles(first, k, v)
        for i, visited in tiling.visits():
            place = first._replace(block=first.block + i)
            results = attend(results, place, keys[visited], values[visited])
        return results, None

    empty_out = jnp.zeros(q.shape, jnp.float32)
    empty_lse = jnp.zeros((q.shape[0], walk.kv_heads, walk.queries_per_key, tiling.size), jnp.float32)
    empty = vary_like((empty_out, empty_lse), x)
    (out, lse), _ = lax.scan(run, empty, walk.steps)
    return out[:, : query.shape[1]], lse[..., : query.shape[1]]


def backward(tiling: WindowTiling, call: PatternCall, x: CallArrays, out, lse, d_out, d_lse=None):
    """Gradients of query, key and value, in float32. d_lse is the cotangent of `forward`'s lse, if any."""
    query, key, value = x.query, x.key, x.value
    walk = _Walk.of(tiling, call, x)
    k, v = tiling.pad_keys(key), tiling.pad_keys(value)
    q, o, do = (tiling.pad_queries(x) for x in (query, out, d_out))
    lse, d_lse = (y if y is None else _pad(y, 0, tiling.size - y.shape[3], axis=3) for y in (lse, d_lse))
    tile, before = tiling.tile, tiling.before
    total = jnp.zeros((key.shape[0], before * tile + tiling.size, *key.shape[2:]), jnp.float32)

    @jax.jit
    def differentiate(d_query: Array, place: Place, keys: Sequence[Array], values: Sequence[Array]):
        do_tile = walk.query_tile(do, place)
        delta = jnp.sum(do_tile * walk.query_tile(o, place), -1)
        if d_lse is not None:
            delta = delta - walk.lse_tile(d_lse, place).reshape(delta.shape)
        chain = walk.chain(place, walk.query_tile(q, place), keys)
        dq_tile, weights, d_scores = _softmax_gradient(
            chain, keys, values, do_tile, delta, walk.lse_tile(lse, place), walk.soft_cap
        )
        q_t, do_t = (x.swapaxes(1, 2) for x in (chain.query, do_tile))
        d_keys = [_product("ndt,nts->nds", q_t, d) for d in d_scores]
        d_values = [_product("ndt,nts->nds", do_t, w) for w in weights]
        return walk.put_rows(d_query, place, dq_tile * call.scale), d_keys, d_values

    def run(totals: tuple[Array, Array, Array], number: Array):
        d_query, d_key, d_value = totals
        first = walk.place(number)
        keys, values = walk.key_tiles(first, k, v)
        d_keys: list[list[Array]] = [[] for _ in keys]
        d_values: list[list[Array]] = [[] for _ in keys]
        for i, visited in tiling.visits():
            place = first._replace(block=first.block + i)
            d_query, dk_tiles, dv_tiles = differentiate(d_query, place, keys[visited], values[visited])
            for j in range(before + 1):
                d_keys[i + j].append(dk_tiles[j])
                d_values[i + j].append(dv_tiles[j])
        d_key, d_value = walk.add_keys(d_key, first, d_keys), walk.add_keys(d_value, first, d_values)
        return (d_query, d_key, d_value), None

    zeros = vary_like((jnp.zeros(q.shape, jnp.float32), total, total), (x, d_out))
    (d_query, d_key, d_value), _ = lax.scan(run, zeros, walk.steps)
    first = before * tile - tiling.shift
    d_key, d_value = (lax.slice_in_dim(x, first, first + key.shape[1], axis=1) for x in (d_key, d_value))
    return d_query[:, : query.shape[1]], d_key, d_value


# Starts are never negative here; JAX would compute what negative ones mean for each.
_slice = functools.partial(lax.dynamic_slice, allow_negative_indices=False)
_updated = functools.partial(lax.dynamic_update_slice, allow_negative_indices=False)


def _product(subscripts: str, x: Array, y: Array) -> Array:
    return jnp.einsum(subscripts, x, y, preferred_element_type=jnp.float32)


def _pad(x: Array, low: int, high: int, axis: int = 1) -> Array:
    if low == 0 and high == 0:
        return x
    widths = [(0, 0, 0)] * x.ndim
    widths[axis] = (low, high, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


def _softmax(chain: Chain, values: Sequence[Array]) -> tuple[Array, Array]:
    """out (k, G, b, H) and log-sum-exp (k, G, b), as `normalise` returns them."""
    tops = [jnp.max(s, -1) if a is None else jnp.max(s, -1) + a for s, a in zip(chain.scores, chain.offsets)]
    top = functools.reduce(jnp.maximum, tops, jnp.full(tops[0].shape, MASKED, jnp.float32))
    weights = _weights(chain, finite_maximum(top))
    total = functools.reduce(jnp.add, (jnp.sum(w, -1) for w in weights))
    parts = [_product("nts,nsd->ntd", w, v) for w, v in zip(_unfold(chain, weights), values)]
    return normalise(SoftmaxSums(top, total, functools.reduce(jnp.add, parts).reshape(*top.shape, -1)))


def _softmax_gradient(
    chain: Chain,
    keys: Sequence[Array],
    values: Sequence[Array],
    d_out: Array,
    delta: Array,
    lse: Array,
    cap: float | None,
) -> tuple[Array, list[Array], list[Array]]:
    """d_query (k, G, b, H), unscaled; for each tile of keys, the weights and the gradients of scores (k, G b, b)."""
    weights = _weights(chain, lse)
    d_weights = _fold(chain.low, [_split_rows(_product("ntd,nsd->nts", d_out, v), lse) for v in values])
    delta = delta.reshape(lse.shape)[..., None]
    changes = [w * (d - delta) for w, d in zip(weights, d_weights)]
    if cap is not None:
        changes = [x * soft_cap_slope(s, cap) for x, s in zip(changes, chain.scores)]
    d_scores = _unfold(chain, changes)
    parts = [_product("nts,nsd->ntd", d, k) for d, k in zip(d_scores, keys)]
    d_query = sum(parts[1:], start=parts[0]).reshape(*lse.shape, -1)
    return d_query, _unfold(chain, weights), d_scores


def _weights(chain: Chain, top: Array) -> list[Array]:
    top = top[..., None]
    return [
        jnp.exp(s - top) if a is None else jnp.exp(s + (a - top)) for s, a in zip(chain.scores, chain.offsets)
    ]


def _split_rows(x: Array, like: Float[Array, "k G b"]) -> Array:
    return x.reshape(*like.shape, x.shape[-1])


def _fold(low: Array, tiles: Sequence[Array]) -> list[Array]:
    """Folds the first and the last tile into one."""
    return [jnp.where(low, tiles[-1], tiles[0]), *tiles[1:-1]]


def _unfold(chain: Chain, tiles: Sequence[Array]) -> list[Array]:
    """Undoes `_fold`, with 0 for the keys of the other tile, and merges rows: (k, G * b, b)."""
    folded, *middle = tiles
    whole = [jnp.where(chain.low, 0.0, folded), *middle, jnp.where(chain.low, folded, 0.0)]
    return [x.reshape(x.shape[0], -1, x.shape[-1]) for x in whole]


@dataclasses.dataclass(frozen=True, eq=False)
class _Walk:
    """The steps of a call, and the slices that each one reads and writes."""

    tiling: WindowTiling
    scale: float
    soft_cap: float | None
    key_lengths: Array | None
    query_segments: Array | None
    key_segments: Array | None
    batch: int
    num_keys: int
    kv_heads: int
    queries_per_key: int  # G

    @classmethod
    def of(cls, tiling: WindowTiling, call: PatternCall, x: CallArrays) -> _Walk:
        query_segments, key_segments = x.query_segments, x.key_segments
        if query_segments is not None and key_segments is not None:
            query_segments = tiling.pad_queries(query_segments)
            key_segments = tiling.pad_keys(key_segments)
        batch, num_keys, kv_heads, _ = x.key.shape
        return cls(
            tiling, call.scale, call.logits_soft_cap, x.key_lengths, query_segments, key_segments,
            batch, num_keys, kv_heads, x.query.shape[2] // kv_heads,
        )  # fmt: skip

    @property
    def head_steps(self) -> int:
        return self.kv_heads // self.tiling.heads

    @property
    def steps(self) -> Array:
        return jnp.arange(self.batch * self.head_steps * self.tiling.groups, dtype=jnp.int32)

    def place(self, number: Array) -> Place:
        """The first block of a step."""
        rest, group = number // self.tiling.groups, number % self.tiling.groups
        return Place(
            rest // self.head_steps, rest % self.head_steps * self.tiling.heads, group * self.tiling.chains
        )

    def query_tile(self, x: Float[Array, "B T N H"], place: Place) -> Float[Array, "k t H"]:
        """The queries of a block, with the rows of one key head together."""
        t, g = self.tiling, self.queries_per_key
        rows = _slice(x, self._rows(place), (1, t.tile, t.heads * g, x.shape[3]))
        rows = rows.reshape(t.tile, t.heads, g, -1).transpose(1, 2, 0, 3)
        return rows.reshape(t.heads, g * t.tile, -1).astype(jnp.float32)

    def _rows(self, place: Place) -> tuple[Any, ...]:
        """Where the queries of a block start."""
        return starts(place.sequence, place.block * self.tiling.tile, place.head * self.queries_per_key, 0)

    def _lse_rows(self, place: Place) -> tuple[Any, ...]:
        return starts(place.sequence, place.head, 0, place.block * self.tiling.tile)

    def lse_tile(self, x: Float[Array, "B K G T"], place: Place) -> Float[Array, "k G t"]:
        return _slice(x, self._lse_rows(place), (1, self.tiling.heads, x.shape[2], self.tiling.tile))[0]

    def _tile_start(self, block: Array, j: int) -> Array:
        """The first row of tile j of a block, in the arranged keys."""
        t = self.tiling
        return jnp.maximum(block + (j - t.before + t.front), 0) * t.tile

    def key_tiles(
        self, first: Place, *arrays: Float[Array, "B S K H"]
    ) -> Iterable[Sequence[Float[Array, "k s H"]]]:
        """For each array, its tiles that the blocks of the step visit."""
        t = self.tiling

        @jax.jit  # traced and lowered once, for all tiles
        def read(block: Array) -> list[Array]:
            start = starts(first.sequence, self._tile_start(block, 0), first.head, 0)
            rows = [_slice(x, start, (1, t.tile, t.heads, x.shape[3])) for x in arrays]
            return [x[0].transpose(1, 0, 2).astype(jnp.float32) for x in rows]

        return zip(*(read(first.block + j) for j in range(t.chains + t.before)))

    def chain(self, place: Place, query: Array, keys: Sequence[Array]) -> Chain:
        t = self.tiling
        query = query * self.scale
        shape = (t.heads, self.queries_per_key, t.tile, t.tile)
        scores = [_product("ntd,nsd->nts", query, k).reshape(shape) for k in keys]
        if self.soft_cap is not None:
            scores = [soft_cap(s, self.soft_cap) for s in scores]
        r = lax.broadcasted_iota(jnp.int32, (t.tile, t.tile), 0)
        c = lax.broadcasted_iota(jnp.int32, (t.tile, t.tile), 1)
        masks = [self._mask(place, j) for j in range(t.before + 1)]
        scores = [s if m is None else jnp.where(m, s, MASKED) for s, m in zip(scores, masks)]
        offsets: list[Array | None] = [None] * t.before
        if t.shift == 0:  # tiles before the sequence; the last tile is the block's own
            outside = [jnp.where(place.block >= t.before - j, 0.0, MASKED) for j in range(t.before)]
            scores[0] = scores[0] + outside[0]
            offsets[1:] = outside[1:]
        low = c <= r
        folded, *middle = _fold(low, scores)
        if t.gap:  # the window begins at key r + gap + 1 of tile 0, which may be in tile 1
            in_second = c > r + (t.gap - t.tile)
            in_last = low if middle else low & in_second
            folded = jnp.where(in_last | (c > r + t.gap), folded, MASKED)
            middle = [jnp.where(in_second, s, MASKED) if j == 0 else s for j, s in enumerate(middle)]
        scores = [folded, *middle]
        return Chain(query, scores, offsets, low)

    def _mask(self, place: Place, j: int) -> Array | None:
        """Which keys of tile j of a block exist and are visible: (b or 1, b) bools, None for all."""
        t = self.tiling
        mask = None
        if t.shift or self.key_lengths is not None:
            index = (place.block + (j - t.before)) * t.tile + t.shift + jnp.arange(t.tile, dtype=jnp.int32)
            stop = jnp.int32(self.num_keys)
            if self.key_lengths is not None:
                stop = self.key_lengths[place.sequence].astype(jnp.int32)
            mask = ((index >= 0) & (index < stop))[None]
        if self.query_segments is not None and self.key_segments is not None:
            rows = _slice(self.query_segments, (place.sequence, place.block * t.tile), (1, t.tile))
            keys = _slice(self.key_segments, (place.sequence, self._tile_start(place.block, j)), (1, t.tile))
            same = rows[0][:, None] == keys
            mask = same if mask is None else mask & same
        return mask

    def put_rows(self, total: Float[Array, "B T N H"], place: Place, x: Float[Array, "k G b H"]) -> Array:
        """`total` with the rows of a block written to it."""
        rows = x.transpose(2, 0, 1, 3).reshape(1, self.tiling.tile, -1, x.shape[3])
        return _updated(total, rows, self._rows(place))

    def put_lse(self, total: Float[Array, "B K G T"], place: Place, x: Float[Array, "k G b"]) -> Array:
        return _updated(total, x[None], self._lse_rows(place))

    def add_keys(
        self, total: Float[Array, "B S K H"], first: Place, tiles: Sequence[Sequence[Array]]
    ) -> Array:
        """Adds the tiles of the step, each the sum of pieces (k, H, b); `total` starts `before` tiles early."""
        sums = [sum(pieces[1:], start=pieces[0]).transpose(2, 0, 1) for pieces in tiles]
        piece = jnp.concatenate(sums)[None]
        start = starts(first.sequence, first.block * self.tiling.tile, first.head, 0)
        return _updated(total, _slice(total, start, piece.shape) + piece, start)
