"""The results of `compress_packed` by attention, and back: what a caller may keep for the backward pass."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.tpu.compress.plan import CompressCall
from pallas_kernels.tpu.core.arithmetic import EMPTY, LOG2E

#: For each attention, its output (B, R, M, N, H) and, with softmax, the log-sum-exp (B, R, N, M): inf if a row sees no
#: key.
Parts = tuple[tuple[Array, ...], tuple[Array | None, ...]]


def to_parts(
    rows: Float[Array, "B sets Q L"],
    statistics: Float[Array, "B tiles R statistics lanes"],
    heads: int,
    head_dim: int,
    call: CompressCall,
) -> Parts:
    """The results of `compress_packed` by attention."""
    sets, packed, width = call.keys, call.layout.packed, call.layout.head_dim
    outs = rows.reshape(rows.shape[0], sets, -1, call.queries, rows.shape[3] // width, width)
    outs = outs[:, :, :, : call.count, :heads, :head_dim]
    log_sums: tuple[Array | None, ...] = (None,) * sets
    if call.score == "softmax":
        top, log_total = jnp.split(statistics, 2, axis=3)
        x = jnp.where(log_total == EMPTY, jnp.inf, top * call.scale + log_total / LOG2E)
        batch, tiles, readers = x.shape[:3]
        x = x.reshape(batch, tiles, readers, packed, sets, call.queries).transpose(4, 0, 2, 1, 3, 5)
        x = x.reshape(sets, batch, readers, tiles * packed, call.queries)[..., :heads, : call.count]
        log_sums = tuple(x[i] for i in range(sets))
    return tuple(outs[:, i] for i in range(sets)), log_sums


def from_parts(
    parts: Parts, call: CompressCall
) -> tuple[Float[Array, "B sets Q L"], Float[Array, "B tiles R statistics lanes"]]:
    """What `compress_packed` returned, up to the rounding of its log-sum-exps."""
    outs, log_sums = parts
    sets, packed, head_dim = call.keys, call.layout.packed, call.layout.head_dim
    batch, readers, count, heads, given = outs[0].shape
    tiles = -(-heads // packed)
    pads = ((0, call.queries - count), (0, tiles * packed - heads), (0, head_dim - given))
    rows = jnp.pad(jnp.stack(outs, 1), ((0, 0), (0, 0), (0, 0), *pads))
    rows = rows.reshape(batch, sets, readers * call.queries, -1)
    if call.score != "softmax":
        return rows, jnp.zeros((batch, tiles, readers, 2 * packed, sets * call.queries), jnp.float32)
    x = jnp.stack([each for each in log_sums if each is not None])
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), *pads[1::-1]), constant_values=jnp.inf)
    x = x.reshape(sets, batch, readers, tiles, packed, call.queries).transpose(1, 3, 2, 4, 0, 5)
    x = x.reshape(batch, tiles, readers, packed, sets * call.queries)
    sees = x < jnp.inf
    return rows, jnp.concatenate([jnp.where(sees, x / call.scale, 0.0), jnp.where(sees, 0.0, EMPTY)], axis=3)
