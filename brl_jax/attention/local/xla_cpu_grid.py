"""Windows in two dimensions on a CPU: one step for each offset within the window, over all positions at once.

A query sees one short run of keys in each row of its window. Between these runs lie keys that it does not see: in an
image of 32 x 32, two rows and columns on each side reach over 132 keys, but only 25 are visible. So instead of visiting
blocks of keys, each step takes the keys at one offset, shifted against all queries:

    score[o, t] = sum over h of query[h, t] * key[h, t + o]

Positions are the minor axis. The heads of a row follow one another, with a margin between them, so that the products
fill vector registers whatever the size of a head. A first loop writes the exponentials that the second one reads;
otherwise XLA would fuse an exponential into each product and compute it once for each feature. An outer loop takes one
row of the batch at a time, whose arrays stay in cache. All arithmetic is in float32.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.scores import soft_cap, soft_cap_slope
from brl_jax.attention.core.softmax import MASKED, SoftmaxSums, finite_maximum, normalise
from brl_jax.attention.core.varying import vary_like
from brl_jax.attention.local.patterns import CallArrays, Neighbourhood, PatternCall

# For wider heads, matrix products over blocks are faster.
_WIDEST_HEAD = 32


@dataclasses.dataclass(frozen=True)
class GridShifts:
    """How a call is divided: by the distances in the sequence from a query to its keys, in ascending order."""

    offsets: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, call: PatternCall, query: Array, key: Array) -> GridShifts | None:
        """None for other patterns, for keys other than the queries' own tokens, and if shifts do not pay off: wide
        heads, or windows that see many of the keys between their first and their last."""
        pattern, length = call.pattern, key.shape[1]
        if not isinstance(pattern, Neighbourhood) or call.key_offset is None or call.query_offset != 0:
            return None
        if query.shape[1] != length or max(query.shape[3], key.shape[3]) > _WIDEST_HEAD:
            return None
        rows, columns = min(pattern.rows, length // pattern.width), min(pattern.columns, pattern.width - 1)
        ahead = np.arange(-rows, rows + 1)[:, None] * pattern.width + np.arange(-columns, columns + 1)
        seen = abs(ahead) < length
        if call.is_causal:
            seen &= ahead <= 0
        offsets = np.unique(ahead[seen])
        # A block would visit its own 128 keys and those within reach.
        if 4 * len(offsets) > offsets[-1] - offsets[0] + 128:
            return None
        return cls(tuple(offsets.tolist()), length)

    @property
    def margin(self) -> int:
        """How far an offset can reach beyond a head's keys."""
        return max(-self.offsets[0], self.offsets[-1])

    @property
    def stride(self) -> int:
        """The distance from one head to the next."""
        return self.length + self.margin

    @property
    def steps(self) -> Int[Array, " O"]:
        return jnp.asarray(np.array(self.offsets, np.int32))

    def arrange(self, x: Float[Array, "B T N *H"]) -> Float[Array, "B *H L"]:
        """Concatenates the heads of each row, with a margin of zeros after each: L = N * stride."""
        x = jnp.moveaxis(x.astype(jnp.float32), 1, -1)
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, self.margin)])
        x = jnp.moveaxis(x, 1, -2)
        return x.reshape(*x.shape[:-2], -1)

    def restore(self, x: Float[Array, "B *H L"]) -> Float[Array, "B T N *H"]:
        """Undoes `arrange`."""
        x = x.reshape(*x.shape[:-1], -1, self.stride)[..., : self.length]
        return jnp.moveaxis(jnp.moveaxis(x, -2, 1), -1, 1)

    def widen(self, x: Float[Array, "*H L"]) -> Float[Array, "*H L+2"]:
        """Adds a margin on both sides, for `shifted`."""
        return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(self.margin, self.margin)])

    def shifted(self, x: Float[Array, "*H L+2"], offset: Array) -> Float[Array, "*H L"]:
        """x, read `offset` places further on."""
        return lax.dynamic_slice_in_dim(x, offset + self.margin, x.shape[-1] - 2 * self.margin, x.ndim - 1)

    def visible(self, call: PatternCall, heads: int) -> Bool[Array, "O L"]:
        """For each offset, which queries may see the key there; `_Row.exists` says whether there is one."""
        place = jnp.arange(self.stride, dtype=jnp.int32)[None]
        key = place + self.steps[:, None]
        first = call.first_position
        return jnp.tile(call.pattern.visible(first + place, first + key), (1, heads))


class _Row(NamedTuple):
    """One row of the batch, arranged: scaled query (H, L), key and value (H, L + 2 margins), and which keys exist
    (L + 2 margins,)."""

    query: Array
    key: Array
    value: Array
    exists: Array


def forward(shifts: GridShifts, call: PatternCall, x: CallArrays) -> tuple[Array, Array]:
    """out (B, T, N, H) in float32 and log-sum-exp (B, K, G, T), as `normalise` returns it."""
    visible = shifts.visible(call, x.query.shape[2])

    def one(row: _Row) -> tuple[Array, Array]:
        places = row.query.shape[1]

        def score(top: Array, step: tuple[Array, Array]) -> tuple[Array, Array]:
            scores, _ = _scores(call, shifts, row, *step)
            return jnp.maximum(top, scores), scores

        empty = vary_like(jnp.full((places,), MASKED, jnp.float32), row)
        top, scores = lax.scan(score, empty, (shifts.steps, visible))
        finite = finite_maximum(top)

        def weigh(total: Array, scores: Array) -> tuple[Array, Array]:
            weight = jnp.exp(scores - finite)
            return total + weight, weight

        total, weights = lax.scan(weigh, vary_like(jnp.zeros((places,), jnp.float32), row), scores)
        weighted = _sum_shifted(shifts, weights, row.value)
        return normalise(SoftmaxSums(top, total, weighted.swapaxes(0, 1)))

    out, lse = lax.map(one, _rows(shifts, call, x))
    out, lse = shifts.restore(out.swapaxes(1, 2)), shifts.restore(lse)
    return out, lse.swapaxes(1, 2).reshape(lse.shape[0], x.key.shape[2], -1, lse.shape[1])


def backward(
    shifts: GridShifts,
    call: PatternCall,
    x: CallArrays,
    out: Array,
    lse: Array,
    d_out: Array,
    d_lse: Array | None = None,
) -> tuple[Array, Array, Array]:
    """Gradients of query, key and value, in float32; arguments as for `xla_cpu.backward`."""
    visible = shifts.visible(call, x.query.shape[2])
    by_row = lambda y: y.reshape(y.shape[0], -1, y.shape[3]).swapaxes(1, 2)  # noqa: E731 (B, K, G, T) to (B, T, N)
    delta = jnp.sum(d_out.astype(jnp.float32) * out.astype(jnp.float32), -1)
    delta = delta if d_lse is None else delta - by_row(d_lse)

    def one(operands: tuple[_Row, Array, Array, Array]) -> tuple[Array, Array, Array]:
        row, d_out, lse, delta = operands

        def weigh(step: tuple[Array, Array]) -> tuple[Array, Array]:
            scores, slope = _scores(call, shifts, row, *step)
            weight = jnp.exp(scores - lse)
            change = weight * (_products(d_out, shifts.shifted(row.value, step[0])) - delta)
            return weight, change if slope is None else change * slope

        weights, changes = lax.map(weigh, (shifts.steps, visible))
        d_query = _sum_shifted(shifts, changes, row.key)
        d_key = _sum_shifted_back(shifts, shifts.widen(changes), shifts.widen(row.query))
        d_value = _sum_shifted_back(shifts, shifts.widen(weights), shifts.widen(d_out))
        return d_query * call.scale, d_key, d_value

    arranged = (_rows(shifts, call, x), *(shifts.arrange(y) for y in (d_out, by_row(lse), delta)))
    d_query, d_key, d_value = (shifts.restore(y) for y in lax.map(one, arranged))

    def of_key_heads(y: Float[Array, "B T N H"]) -> Float[Array, "B T K H"]:
        shape = (*y.shape[:2], x.key.shape[2], -1, y.shape[3])
        return y.reshape(shape).sum(3)

    return d_query, of_key_heads(d_key), of_key_heads(d_value)


def _rows(shifts: GridShifts, call: PatternCall, x: CallArrays) -> _Row:
    """All rows, to loop over; each query head gets its own copy of its key head."""
    heads, kv_heads = x.query.shape[2], x.key.shape[2]
    key, value = (
        shifts.widen(shifts.arrange(jnp.repeat(y, heads // kv_heads, axis=2))) for y in (x.key, x.value)
    )
    stop = jnp.full(x.key.shape[:1], shifts.length, jnp.int32) if x.key_lengths is None else x.key_lengths
    exists = jnp.arange(shifts.stride, dtype=jnp.int32)[None] < stop.astype(jnp.int32)[:, None]
    return _Row(shifts.arrange(x.query) * call.scale, key, value, shifts.widen(jnp.tile(exists, (1, heads))))


def _products(query: Float[Array, "H L"], key: Float[Array, "H L"]) -> Float[Array, " L"]:
    """The product of each query with the key at its index, one feature at a time: XLA's sum over a major axis would not
    fill vector registers."""
    return functools.reduce(jnp.add, [query[h] * key[h] for h in range(query.shape[0])])


def _scores(
    call: PatternCall, shifts: GridShifts, row: _Row, offset: Array, visible: Bool[Array, " L"]
) -> tuple[Float[Array, " L"], Float[Array, " L"] | None]:
    """The scores of the keys at an offset, MASKED if the query does not see the key, and the slope of the cap."""
    scores = _products(row.query, shifts.shifted(row.key, offset))
    slope = None
    if call.logits_soft_cap is not None:
        scores = soft_cap(scores, call.logits_soft_cap)
        slope = soft_cap_slope(scores, call.logits_soft_cap)
    return jnp.where(visible & shifts.shifted(row.exists, offset), scores, MASKED), slope


def _sum_shifted(
    shifts: GridShifts, weights: Float[Array, "O L"], x: Float[Array, "H L+2"]
) -> Float[Array, "H L"]:
    """out[t] = sum over o of weights[o, t] * x[t + o]."""

    def add(total: Array, step: tuple[Array, Array]) -> tuple[Array, None]:
        offset, weight = step
        return total + weight[None] * shifts.shifted(x, offset), None

    zeros = vary_like(jnp.zeros((x.shape[0], weights.shape[1]), jnp.float32), (weights, x))
    return lax.scan(add, zeros, (shifts.steps, weights))[0]


def _sum_shifted_back(
    shifts: GridShifts, weights: Float[Array, "O L+2"], x: Float[Array, "H L+2"]
) -> Float[Array, "H L"]:
    """The transpose of `_sum_shifted`: out[t] = sum over o of weights[o, t - o] * x[t - o]."""

    def add(total: Array, step: tuple[Array, Array]) -> tuple[Array, None]:
        offset, weight = step
        return total + shifts.shifted(weight, -offset)[None] * shifts.shifted(x, -offset), None

    places = weights.shape[1] - 2 * shifts.margin
    zeros = vary_like(jnp.zeros((x.shape[0], places), jnp.float32), (weights, x))
    return lax.scan(add, zeros, (shifts.steps, weights))[0]
