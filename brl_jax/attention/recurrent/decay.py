"""States that shrink from token to token: the factors within a chunk, per head or per feature.

Every factor is the exponential of a sum of logarithms that are at most 0, so it cannot overflow, however strong the
decay. Each sum runs only over the tokens between two tokens. A difference of sums from the chunk's first token would
lose a weak decay behind a strong one, and its exponential could overflow.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Bool, Float

from brl_jax.attention.core.checks import require
from brl_jax.attention.core.products import multiply_precisely
from brl_jax.attention.recurrent.chunk_scan import SAVED, ChunkVisibility
from brl_jax.attention.recurrent.rows import heads_first, mask_rows, mask_scores, zero_unless

# Blocks of this size have a factor for every pair of tokens and every feature.
_BLOCK = 8


class HeadDecay(NamedTuple):
    """The factors within a chunk if all features of a head shrink alike.

    Attributes:
      pairs: from after token j to token i, for j up to i; 1 elsewhere.
      start, end: from the chunk's first token through token i, and from after token i to the chunk's end.
      total: over the chunk.
    """

    pairs: Float[Array, "B K C C"]
    start: Float[Array, "B K C 1"]
    end: Float[Array, "B K C 1"]
    total: Float[Array, "B K 1 1"]


class FeatureDecay(NamedTuple):
    """The factors within a chunk if each feature has its own.

    Attributes:
      products: row i times key j, each feature weighted by its factor between them, for j up to i; finite elsewhere.
      start, end, total: as for `HeadDecay`.
    """

    products: Float[Array, "B K R C"]
    start: Float[Array, "B K C F"]
    end: Float[Array, "B K C F"]
    total: Float[Array, "B K F 1"]


def clip_log_decay(log_decay: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Makes logarithms finite: exp(-200) is 0 in float32, and 0 times -inf is NaN."""
    return jnp.maximum(log_decay, -200.0)


def head_decay(log: Float[Array, "B K C 1"]) -> HeadDecay:
    """The factors for one logarithm, at most 0, per head and token."""
    log = clip_log_decay(log)
    length = log.shape[2]
    later = jnp.tri(length, k=-1, dtype=log.dtype)[None, None]
    between = multiply_precisely(jnp.tri(length, dtype=log.dtype)[None, None], later * log)
    pairs = checkpoint_name(jnp.exp(between), SAVED)
    start = pairs[..., :1] * jnp.exp(log[:, :, :1])
    return HeadDecay(pairs, start, jnp.swapaxes(pairs[:, :, -1:], -1, -2), start[:, :, -1:])


def feature_decay(
    rows: Float[Array, "B K R F"], keys: Float[Array, "B K C F"], log: Float[Array, "B K C F"]
) -> FeatureDecay:
    """The factors for one logarithm per feature and token, and the products of rows and keys weighted by them.

    The product of row i and key j is sum_f rows_if keys_jf exp(sum of log_lf for j < l <= i). Blocks of doubling
    size are joined in pairs: the second block's rows shrink from its beginning, and the first block's keys until
    its end. These are GLA's secondary chunks (arXiv:2312.06635, section 4.3) at every size, so no factor belongs to
    a pair of tokens and a feature.

    Args:
      rows: as from `group_rows`, G rows for each token.
      log: at most 0.
    """
    length, size = keys.shape[2:]
    width = 1 << (length - 1).bit_length()
    block = min(_BLOCK, width)
    log, keys = (_pad_tokens(x, width) for x in (clip_log_decay(log), keys))
    rows = _pad_tokens(rows.reshape(*rows.shape[:2], -1, length, size), width)
    products, sums = _within_blocks(*(_cut(x, block) for x in (rows, keys, log)))
    while block < width:
        second = _cut(rows, block)[..., 1::2, :, :] * jnp.exp(sums.start[:, :, None, 1::2])
        first = _cut(keys, block)[..., 0::2, :, :] * jnp.exp(sums.end[..., 0::2, :, :])
        corner = jnp.einsum("bkgnif,bknjf->bkgnij", second, first)
        upper = jnp.pad(products[..., 0::2, :, :], [(0, 0)] * 5 + [(0, block)])
        lower = jnp.concatenate([corner, products[..., 1::2, :, :]], axis=-1)
        products = jnp.concatenate([upper, lower], axis=-2)
        sums = _join_pairs(sums)
        block *= 2
    start, end = (jnp.exp(x[:, :, 0, :length]) for x in sums)
    products = products[..., 0, :length, :length].reshape(*rows.shape[:2], -1, length)
    return FeatureDecay(products, start, end, jnp.swapaxes(start[:, :, -1:], -1, -2))


class _Sums(NamedTuple):
    """Sums of logarithms in each block: from its first token through token i, and from after token i to its last."""

    start: Float[Array, "B K blocks b F"]
    end: Float[Array, "B K blocks b F"]


def _join_pairs(sums: _Sums) -> _Sums:
    """The sums in blocks of twice the size."""
    first, second = (_Sums(*(x[:, :, i::2] for x in sums)) for i in (0, 1))
    return _Sums(
        jnp.concatenate([first.start, second.start + first.start[..., -1:, :]], axis=-2),
        jnp.concatenate([first.end + second.start[..., -1:, :], second.end], axis=-2),
    )


def _within_blocks(
    rows: Float[Array, "B K G blocks b F"],
    keys: Float[Array, "B K blocks b F"],
    log: Float[Array, "B K blocks b F"],
) -> tuple[Float[Array, "B K G blocks b b"], _Sums]:
    """The products of rows and keys in the same block.

    For each size of smaller block, it multiplies all tokens of the block and keeps the pairs at that size, which is
    faster than products of a few tokens. One product for all sizes, with another axis, is slower on a CPU: eight
    times in the backward pass.
    """

    def multiply(rows: Array, keys: Array) -> Array:
        return jnp.einsum("bkgnif,bknjf->bkgnij", rows, keys)

    tokens, block = keys.shape[-2], 1
    number = jnp.arange(tokens)
    products = multiply(rows, keys)
    sums = _Sums(*(_cut(_uncut(x), 1) for x in (log, jnp.zeros_like(log))))
    while block < tokens:
        second = number // block % 2 == 1
        start, end = (_cut(_uncut(x), tokens) for x in sums)
        factors = jnp.exp(jnp.where(second[None, None, None, :, None], start, end))
        pairs = second[:, None] & (number[:, None] // block == number[None] // block + 1)
        joined = multiply(rows * factors[:, :, None], keys * factors)
        products = jnp.where(pairs[None, None, None, None], joined, products)
        sums = _join_pairs(sums)
        block *= 2
    return products, sums


def _pad_tokens(x: Float[Array, "*leading C F"], width: int) -> Float[Array, "*leading W F"]:
    return jnp.pad(x, [(0, 0)] * (x.ndim - 2) + [(0, width - x.shape[-2]), (0, 0)])


def _cut(x: Float[Array, "*leading C F"], block: int) -> Float[Array, "*leading blocks b F"]:
    return x.reshape(*x.shape[:-2], x.shape[-2] // block, block, x.shape[-1])


def _uncut(x: Float[Array, "*leading blocks b F"]) -> Float[Array, "*leading C F"]:
    return x.reshape(*x.shape[:-3], -1, x.shape[-1])


# --- Sums of outer products ---


class DecayedSum(NamedTuple):
    """What a chunk does to a state of outer products: S -> total S + added."""

    added: Float[Array, "*leading K F V"]
    total: Float[Array, "*leading K #F 1"]


def check_log_decay(log_decay: Any, key_shape: tuple[int, ...], num_features: int) -> Array:
    """Returns the logarithms as (B, T, K) or (B, T, K, F), from these shapes or (K,).

    Args:
      key_shape: (B, T, K, H).

    Raises:
      ValueError: the shape is different, or the dtype is not floating point.
    """
    shapes = (key_shape[2:3], key_shape[:3], (*key_shape[:3], num_features))
    require(
        jnp.issubdtype(log_decay.dtype, jnp.floating) and log_decay.shape in shapes,
        f"log_decay must be floating point of shape {', '.join(map(str, shapes[:2]))} or {shapes[2]}, got "
        f"{log_decay.dtype} of shape {log_decay.shape}",
    )
    return jnp.broadcast_to(log_decay, key_shape[:3]) if log_decay.ndim == 1 else log_decay


def decayed_step(
    rows: Float[Array, "B K R F"],
    keys: Float[Array, "B K C F"],
    values: Float[Array, "B K C V"],
    log_decay: Float[Array, "B C K"] | Float[Array, "B C K F"],
    state: Float[Array, "B K F V"],
    visibility: ChunkVisibility,
) -> tuple[DecayedSum, Float[Array, "B K R V"]]:
    """One chunk of linear attention with decay: its change of the state, and its outputs.

    Args:
      rows, keys: features, with heads before tokens.
    """
    length = keys.shape[2]
    if log_decay.ndim == 3:
        decay: HeadDecay | FeatureDecay = head_decay(heads_first(log_decay[..., None]))
        products = jnp.einsum("bkrf,bkcf->bkrc", rows, keys) * for_rows(decay[0], rows, length)
    else:
        decay = feature_decay(rows, keys, heads_first(log_decay))
        products = decay.products
    reads = mask_rows(visibility.reads_state, rows) * for_rows(decay.start, rows, length)
    out = jnp.einsum("bkrf,bkfv->bkrv", reads, state)
    out = out + jnp.einsum("bkrc,bkcv->bkrv", mask_scores(visibility.pairs, products), values)
    adds = keys if visibility.enters_state is None else zero_unless(visibility.enters_state[:, None], keys)
    return DecayedSum(jnp.einsum("bkcf,bkcv->bkfv", adds * decay.end, values), decay.total), out


def for_rows(x: Float[Array, "B K C X"], rows: Float[Array, "B K R F"], length: int) -> Array:
    """Repeats each token's numbers for all of its rows."""
    return jnp.tile(x, (1, 1, rows.shape[2] // length, 1))


def apply_sum(
    state: Float[Array, "*leading K F V"], following: DecayedSum, keeps: Bool[Array, "*leading"] | None
) -> Float[Array, "*leading K F V"]:
    """The state after the following chunks."""
    return following.total * zero_unless(keeps, state) + following.added


def join_sums(earlier: DecayedSum, later: DecayedSum, keeps: Bool[Array, "*leading"] | None) -> DecayedSum:
    """The change of the state by two adjacent runs of chunks."""
    return DecayedSum(apply_sum(earlier.added, later, keeps), earlier.total * later.total)
