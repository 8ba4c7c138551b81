"""Sparse Sinkhorn attention: each block attends to itself and to a learned mixture of blocks (Tay et al. 2020)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int, PRNGKeyArray

from brl_jax.attention.core.arguments import (
    check_dtypes,
    check_lengths,
    check_scale,
    starts,
    zero_padding,
)
from brl_jax.attention.core.boundary import attention_function
from brl_jax.attention.core.checks import check_new_tokens, check_qkv, require
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.core.softmax import softmax_weights
from brl_jax.fields import Count, Positive

# The logarithm of a weight that does not exist: finite, so that differences are not NaN.
_LOG_ZERO = -1e30


class _Blocks(NamedTuple):
    """Keys and values in blocks."""

    key: Float[Array, "B R W K H"]
    value: Float[Array, "B R W K V"]


@attention_function
def sinkhorn_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    sort_logits: Float[Array, "B C K C"],
    *,
    block_size: Count = 64,
    iterations: Count = 8,
    temperature: Positive = 0.75,
    rng: PRNGKeyArray | None = None,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Softmax attention of each block of tokens to its own keys and to those of a block that sorting brings to it.

    (B, T, N, H), (B, T, K, H), (B, T, K, V), (B, C, K, C) -> (B, T, N, V)::

        out = sinkhorn_attention(query, key, value, sort_logits, block_size=64, is_causal=True)

      S = Sinkhorn(exp((R + noise) / temperature));  K'_i = sum_j S_ij K_j, V'_i = sum_j S_ij V_j for the blocks i
      out = softmax(scale q [K'_i, K_i]^T) [V'_i; V_i] for the queries of block i

    Sparse Sinkhorn Attention (arXiv:2002.11296), section 3. R comes from a sorting network of the blocks' sums;
    Sinkhorn divides rows and columns by their sums in turn, so that S comes near to a permutation of the blocks
    (`balanced`).
    `reference.sinkhorn_attention` is the plain form. The authors' code for the Long Range Arena adds the outputs of two
    softmaxes, over own and over sorted keys; here one softmax is over both.

    Causal: R_i must depend on nothing after the first token of block i (the paper's causal sum). Block i reads complete
    blocks alone, those before it, and the first block reads only itself. The sum of a column runs over the rows up to
    its own, because whole columns would let later blocks change the weights of earlier ones.

    With W = block_size, O(T W + T^2 / W) time, the second part for mixing the blocks, and O(T W + T^2 / W^2) memory.

    Args:
      query, key, value: (B, T, N, H), (B, T, K, H) and (B, T, K, V) of the same tokens, float32, bfloat16 or float16; K
        divides N.
      sort_logits: R for each key head, with C = ceil(T / block_size) rows (blocks that read) and columns (blocks that
        are read).
      block_size: tokens of a block; the last one may have fewer, and lacks the rest in the mixture.
      iterations: how many times rows and columns are divided.
      temperature: smaller ones make S more like a permutation.
      rng: adds Gumbel noise drawn from this key to R, as the paper does in training; None for none.
      scale: the scale of the scores; 1 / sqrt(H) by default.
      is_causal: as above.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding, which may contain anything: its
        blocks take no part in the sorting. Padded rows give 0.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the dtype of the query, computed in float32.

    Raises:
      ValueError: shapes, dtypes, sizes, a temperature or an implementation that do not fit, naming the argument.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    check_implementation(implementation, None, "xla")
    require(
        query.shape[1] == key.shape[1],
        f"key must have query's length {query.shape[1]}, as both are the same tokens here, got {key.shape[1]}",
    )
    scale = check_scale(scale, query.shape[3])
    batch, length = query.shape[:2]
    count = -(-length // block_size)
    _check_logits(sort_logits, (batch, count, key.shape[2], count))
    given = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch, length)
    dtype = query.dtype
    query, key, value = (
        _cut(zero_padding(x, given).astype(jnp.float32), block_size) for x in (query, key, value)
    )
    lengths = jnp.full((batch,), length, jnp.int32) if given is None else given
    exists = jnp.arange(count, dtype=jnp.int32)[None] * block_size < lengths[:, None]
    weights = balanced(sort_logits, exists, iterations, temperature, is_causal, rng)
    own = _Blocks(key, value)
    # A place of the sorted block exists if it does in some block, so that the first one has it.
    offsets = jnp.arange(block_size, dtype=jnp.int32)
    numbers = jnp.arange(count, dtype=jnp.int32)
    if is_causal:
        read = jnp.broadcast_to((numbers > 0)[None, :, None], (batch, count, block_size))
    else:
        read = jnp.broadcast_to((offsets[None] < lengths[:, None])[:, None], (batch, count, block_size))
    places = numbers[:, None] * block_size + offsets[None]
    present = places[None] < lengths[:, None, None]
    out = _attend(query, _mix(weights, own), own, read, present, scale, is_causal)
    out = out.reshape(batch, count * block_size, *out.shape[3:])[:, :length]
    return zero_padding(out, given).astype(dtype)


@attention_function
def sinkhorn_step(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    sort_logits: Float[Array, "B C K C"],
    *,
    start: Int[Array, ""] | int,
    block_size: Count = 64,
    iterations: Count = 8,
    temperature: Positive = 0.75,
    scale: float | None = None,
) -> Float[Array, "B T N V"]:
    """Causal `sinkhorn_attention` of T new tokens after `start` earlier ones.

    (B, T, N, H), (B, S, K, H), (B, S, K, V), (B, C, K, C) -> (B, T, N, V)::

        out = sinkhorn_step(query, key, value, sort_logits, start=0, block_size=64)

    It mixes the blocks before those of the new tokens anew: O(S) time for a few tokens, as full attention.

    Args:
      query: of the new tokens.
      key, value: of all tokens, with room for later ones: those at start .. start + T are of the new tokens. Room that
        no token has filled must be finite. A multiple of `block_size` needs no copy of them.
      sort_logits: the rows of the blocks that have begun; the others may contain any finite number.
      start: the number of earlier tokens.
      block_size, iterations, temperature, scale: as there.

    Returns:
      (B, T, N, V) in the dtype of the query.

    Raises:
      ValueError: shapes, dtypes, sizes or a temperature that do not fit, naming the argument.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    scale = check_scale(scale, query.shape[3])
    batch, length = query.shape[:2]
    require(
        length <= key.shape[1],
        f"key must have room for query's {length} new tokens, got a length of {key.shape[1]}",
    )
    check_new_tokens(start, None, length, key.shape[1])
    count = -(-key.shape[1] // block_size)
    _check_logits(sort_logits, (batch, count, key.shape[2], count))
    dtype = query.dtype
    # Heads before tokens, as `KeyValueCache` keeps them: (B, K, C, W, H).
    blocks = [_cut(jnp.swapaxes(x, 1, 2).astype(jnp.float32), block_size, axis=2) for x in (key, value)]
    last = blocks[0].shape[2] - 1
    weights = balanced(sort_logits, None, iterations, temperature, True, None)
    # The blocks that the new tokens may lie in.
    touched = -(-length // block_size) + 1
    numbers = start // block_size + jnp.arange(touched, dtype=jnp.int32)
    within = jnp.minimum(numbers, last)
    own = _Blocks(*(jnp.transpose(jnp.take(x, within, axis=2), (0, 2, 3, 1, 4)) for x in blocks))
    offset = jnp.asarray(start % block_size, jnp.int32)
    rows = jnp.zeros((batch, touched * block_size, *query.shape[2:]), jnp.float32)
    rows = lax.dynamic_update_slice(rows, query.astype(jnp.float32), starts(0, offset, 0, 0))
    read = jnp.broadcast_to((numbers > 0)[None, :, None], (batch, touched, block_size))
    mixing = jnp.take(weights, within, axis=2)
    mixed = _Blocks(*(_mix_heads(mixing, x) for x in blocks))
    out = _attend(_cut(rows, block_size), mixed, own, read, jnp.ones_like(read), scale, True)
    out = out.reshape(batch, touched * block_size, *out.shape[3:])
    return lax.dynamic_slice_in_dim(out, offset, length, axis=1).astype(dtype)


def balanced(
    sort_logits: Float[Array, "B C K C"],
    exists: Bool[Array, "B C"] | None,
    iterations: int,
    temperature: float,
    is_causal: bool,
    rng: PRNGKeyArray | None,
) -> Float[Array, "B K C C"]:
    """Sinkhorn's normalisation of exp(sort_logits / temperature), in logarithms (arXiv:2002.11296, section 3).

    Each iteration divides rows by their sums and then columns. Causal: row i has weights for the columns before i, and
    a column's sum runs over the rows up to its own.

    Args:
      exists: whether each block takes part; None for all.
      rng: adds Gumbel noise to the logits; None for none.
    """
    logits = jnp.moveaxis(sort_logits.astype(jnp.float32), 2, 1)
    if rng is not None:
        logits = logits + jax.random.gumbel(rng, logits.shape, jnp.float32)
    count = logits.shape[2]
    seen = jnp.tri(count, k=-1, dtype=bool) if is_causal else jnp.ones((count, count), bool)
    seen = seen[None, None]
    if exists is not None:
        seen = seen & exists[:, None, :, None] & exists[:, None, None, :]

    def divide(logits: Array, _: Any) -> tuple[Array, None]:
        rows = jax.nn.logsumexp(logits, axis=3, keepdims=True)
        logits = jnp.where(seen, logits - rows, _LOG_ZERO)
        if is_causal:
            columns = lax.associative_scan(jnp.logaddexp, logits, axis=2)
        else:
            columns = jax.nn.logsumexp(logits, axis=2, keepdims=True)
        return jnp.where(seen, logits - columns, _LOG_ZERO), None

    logits = jnp.where(seen, logits / temperature, _LOG_ZERO)
    return jnp.exp(lax.scan(divide, logits, None, length=iterations)[0])


def _check_logits(sort_logits: Any, shape: tuple[int, ...]) -> None:
    require(
        hasattr(sort_logits, "shape")
        and sort_logits.shape == shape
        and jnp.issubdtype(sort_logits.dtype, jnp.floating),
        f"sort_logits must be a floating-point array of shape {shape}, got "
        + (f"{sort_logits.dtype} of shape {sort_logits.shape}" if hasattr(sort_logits, "shape") else "none"),
    )


def _cut(x: Float[Array, "B *T"], block_size: int, axis: int = 1) -> Float[Array, "B *R"]:
    """x with its axis of tokens cut in blocks of tokens, with zeros after the last token."""
    count = -(-x.shape[axis] // block_size)
    room = [(0, 0)] * x.ndim
    room[axis] = (0, count * block_size - x.shape[axis])
    return jnp.pad(x, room).reshape(*x.shape[:axis], count, block_size, *x.shape[axis + 1 :])


def _mix(weights: Float[Array, "B K R C"], blocks: _Blocks) -> _Blocks:
    """For each of R rows of weights the mixture of the C blocks, place by place."""
    return _Blocks(*(jnp.einsum("bkrc,bcwkh->brwkh", weights, x) for x in blocks))


def _mix_heads(weights: Float[Array, "B K R C"], blocks: Float[Array, "B K C W H"]) -> Array:
    """The same for one array with its heads first; the result is (B, R, W, K, H). A block's places and features are one
    axis of the product, as otherwise the compiler would transpose all blocks."""
    batch, heads, count, size, width = blocks.shape
    mixed = jnp.einsum("bkrc,bkcx->bkrx", weights, blocks.reshape(batch, heads, count, size * width))
    return jnp.transpose(mixed.reshape(batch, heads, -1, size, width), (0, 2, 3, 1, 4))


def _attend(
    query: Float[Array, "B R W N H"],
    mixed: _Blocks,
    own: _Blocks,
    read: Bool[Array, "B R W"],
    present: Bool[Array, "B R W"],
    scale: float,
    is_causal: bool,
) -> Float[Array, "B R W N V"]:
    """One softmax over the places of the mixed block that are `read` and the own tokens that are `present`."""
    shape = query.shape
    key, value = (jnp.concatenate(pair, axis=2) for pair in zip(mixed, own))
    rows = query.reshape(*shape[:3], key.shape[3], -1, shape[4])
    scores = jnp.einsum("brwkgh,brskh->brkgws", rows, key) * scale
    size = shape[2]
    order = jnp.tri(size, dtype=bool) if is_causal else jnp.ones((size, size), bool)
    mask = jnp.concatenate(
        [
            jnp.broadcast_to(read[:, :, None], (*shape[:3], size)),
            present[:, :, None] & order[None, None],
        ],
        axis=3,
    )
    weights = softmax_weights(scores, mask[:, :, None, None])
    out = jnp.einsum("brkgws,brskv->brwkgv", weights, value)
    return out.reshape(*shape[:4], -1)
