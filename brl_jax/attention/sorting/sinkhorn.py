"""Sparse Sinkhorn attention: each block attends to itself and to a learned mixture of blocks (Tay et al. 2020)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, DTypeLike, Float, Int, PRNGKeyArray

from brl_jax.attention.core.checks import require, starts, zero_padding
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.query_blocks import in_blocks
from brl_jax.attention.core.same_tokens import prepare_same_tokens
from brl_jax.attention.core.softmax import softmax_weights
from brl_jax.attention.core.state import KeyValueCache, check_state
from brl_jax.fields import Count, Positive, declared

# The logarithm of a missing weight, finite so that differences are not NaN.
_LOG_ZERO = -1e30


class _Blocks(NamedTuple):
    key: Float[Array, "B R W K H"]
    value: Float[Array, "B R W K V"]


@declared
def init_sinkhorn_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    length: Count,
    block_size: Count = 64,
    dtype: DTypeLike = jnp.float32,
) -> KeyValueCache:
    """Returns the state of `sinkhorn_attention` before the first of up to `length` tokens: keys and values.

    Its capacity is a whole number of blocks, so that cutting it into blocks copies nothing.

    Raises:
      ValueError: a size is below 1.
    """
    value_dim = head_dim if value_dim is None else value_dim
    tokens = (batch, -(-length // block_size) * block_size, num_kv_heads)
    return KeyValueCache.empty((*tokens, head_dim), (*tokens, value_dim), dtype)


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
    state: KeyValueCache | None = None,
    return_state: bool = False,
    count: Int[Array, ""] | int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], KeyValueCache]:
    """Softmax attention of each block of tokens to its own keys and to a mixture of blocks, learned by sorting.

    (B, T, N, H), (B, T, K, H), (B, T, K, V), (B, C, K, C) -> (B, T, N, V)::

        out = sinkhorn_attention(query, key, value, sort_logits, block_size=64, is_causal=True)

      S = Sinkhorn(exp((R + noise) / temperature));  K'_i = sum_j S_ij K_j, V'_i = sum_j S_ij V_j for the blocks i
      out = softmax(scale q [K'_i, K_i]^T) [V'_i; V_i] for the queries of block i

    Sparse Sinkhorn Attention (arXiv:2002.11296), section 3. A sorting network computes R from the sums of the blocks.
    Sinkhorn (`balanced`) divides rows and columns by their sums in turn, which brings S close to a permutation of the
    blocks. The authors' code for the Long Range Arena adds the outputs of two softmaxes, over own and over sorted keys;
    here one softmax covers both.

    Causal: R_i must not depend on anything after the first token of block i (the paper's causal sum). Block i reads
    only the complete blocks before it; the first block reads only itself. A column's sum runs over the rows up to its
    own, because with whole columns later blocks would change the weights of earlier ones.

    With W = block_size, time is O(T W + T^2 / W), the second part for mixing blocks, and memory O(T W + T^2 / W^2).

    Generation continues from a state and mixes the earlier blocks again at each call, in O(S) time for few tokens::

        state = init_sinkhorn_state(batch, num_kv_heads, head_dim, length=4096)
        out, state = sinkhorn_attention(..., is_causal=True, state=state, return_state=True)

    Args:
      query, key, value: (B, T, N, H), (B, T, K, H) and (B, T, K, V) of the same tokens, float32, bfloat16 or float16; K
        divides N.
      sort_logits: R for each key head, with a row for each block that reads and a column for each block that is read.
        There are C = ceil(T / block_size) blocks; with a state, all blocks of its capacity, and the rows of blocks that
        have not begun may contain any finite number.
      block_size: tokens in a block. The last block may be shorter; its missing tokens do not enter the mixture.
      iterations: how often rows and columns are divided.
      temperature: smaller values bring S closer to a permutation.
      rng: adds Gumbel noise drawn from this key to R, as the paper does in training. Without a state only.
      scale: scale of the scores; 1 / sqrt(H) by default.
      is_causal: as above.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding. Padding may contain anything, its
        blocks are not sorted, and its rows give 0. Without a state only.
      state: from `init_sinkhorn_state` or an earlier call; causal only.
      return_state: also return the state after these tokens; needs a state.
      count: with a state, how many of the T tokens are valid, from the first (None: all). The outputs of the others are
        undefined.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    given_key, given_value = key, value
    query, key, value, given, scale, dtype = prepare_same_tokens(
        query, key, value, scale=scale, key_value_seq_lengths=key_value_seq_lengths, implementation=implementation,
        maker="init_sinkhorn_state", is_causal=is_causal, state=state, return_state=return_state, count=count,
    )  # fmt: skip
    batch, length = query.shape[:2]
    if state is not None:
        require(rng is None, "rng must be None with a state: noise is for training")
        sizes, room = (batch, *key.shape[2:], value.shape[3]), state.keys.shape[2]
        check_state(state, init_sinkhorn_state, *sizes, length=room, block_size=block_size, dtype=dtype)
        blocks = state.keys.shape[2] // block_size
        _check_logits(sort_logits, (batch, blocks, key.shape[2], blocks))
        weights = balanced(sort_logits, None, iterations, temperature, True, None)
        start, state = state.length, state.append(given_key, given_value, count)
        out = _attend_new(query, state, weights, start, block_size, scale).astype(dtype)
        return (out, state) if return_state else out
    blocks = -(-length // block_size)
    _check_logits(sort_logits, (batch, blocks, key.shape[2], blocks))
    query, key, value = (in_blocks(x, block_size) for x in (query, key, value))
    lengths = jnp.full((batch,), length, jnp.int32) if given is None else given
    exists = jnp.arange(blocks, dtype=jnp.int32)[None] * block_size < lengths[:, None]
    weights = balanced(sort_logits, exists, iterations, temperature, is_causal, rng)
    own = _Blocks(key, value)
    offsets = jnp.arange(block_size, dtype=jnp.int32)
    numbers = jnp.arange(blocks, dtype=jnp.int32)
    # A place in the mixture exists if the first block, the longest one, has it.
    if is_causal:
        read = jnp.broadcast_to((numbers > 0)[None, :, None], (batch, blocks, block_size))
    else:
        read = jnp.broadcast_to((offsets[None] < lengths[:, None])[:, None], (batch, blocks, block_size))
    places = numbers[:, None] * block_size + offsets[None]
    present = places[None] < lengths[:, None, None]
    out = _attend(query, _mix(weights, own), own, read, present, scale, is_causal)
    out = out.reshape(batch, blocks * block_size, *out.shape[3:])[:, :length]
    return zero_padding(out, given).astype(dtype)


def _attend_new(
    query: Float[Array, "B T N H"],
    past: KeyValueCache,
    weights: Float[Array, "B K C C"],
    start: Any,
    block_size: int,
    scale: float,
) -> Float[Array, "B T N V"]:
    """Causal attention of the T tokens from position `start` on; `past` includes them."""
    batch, length = query.shape[:2]
    blocks = [in_blocks(x.astype(jnp.float32), block_size, axis=2) for x in (past.keys, past.values)]
    last = blocks[0].shape[2] - 1
    # The new tokens may touch this many blocks.
    touched = -(-length // block_size) + 1
    numbers = start // block_size + jnp.arange(touched, dtype=jnp.int32)
    within = jnp.minimum(numbers, last)
    own = _Blocks(*(jnp.transpose(jnp.take(x, within, axis=2), (0, 2, 3, 1, 4)) for x in blocks))
    offset = jnp.asarray(start % block_size, jnp.int32)
    rows = jnp.zeros((batch, touched * block_size, *query.shape[2:]), jnp.float32)
    rows = lax.dynamic_update_slice(rows, query, starts(0, offset, 0, 0))
    read = jnp.broadcast_to((numbers > 0)[None, :, None], (batch, touched, block_size))
    mixing = jnp.take(weights, within, axis=2)
    mixed = _Blocks(*(_mix_heads(mixing, x) for x in blocks))
    out = _attend(in_blocks(rows, block_size), mixed, own, read, jnp.ones_like(read), scale, True)
    out = out.reshape(batch, touched * block_size, *out.shape[3:])
    return lax.dynamic_slice_in_dim(out, offset, length, axis=1)


def balanced(
    sort_logits: Float[Array, "B C K C"],
    exists: Bool[Array, "B C"] | None,
    iterations: int,
    temperature: float,
    is_causal: bool,
    rng: PRNGKeyArray | None,
) -> Float[Array, "B K C C"]:
    """Sinkhorn's normalisation of exp(sort_logits / temperature), in logarithms (arXiv:2002.11296, section 3).

    Each iteration divides rows by their sums and then columns. Causal: row i has weights only for the columns before i,
    and a column's sum runs over the rows up to its own.

    Args:
      exists: whether each block takes part; None for all.
      rng: adds Gumbel noise to the logits.
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


def _check_logits(sort_logits: Array, shape: tuple[int, ...]) -> None:
    require(
        sort_logits.shape == shape and jnp.issubdtype(sort_logits.dtype, jnp.floating),
        f"sort_logits must be a floating-point array of shape {shape}, got {sort_logits.dtype} of shape "
        f"{sort_logits.shape}",
    )


def _mix(weights: Float[Array, "B K R C"], blocks: _Blocks) -> _Blocks:
    """The mixture of the C blocks for each of R rows of weights."""
    return _Blocks(*(jnp.einsum("bkrc,bcwkh->brwkh", weights, x) for x in blocks))


def _mix_heads(weights: Float[Array, "B K R C"], blocks: Float[Array, "B K C W H"]) -> Array:
    """`_mix` for one array with heads first; returns (B, R, W, K, H)."""
    # Tokens and features form one axis of the product; otherwise the compiler would transpose all blocks.
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
    """One softmax over the mixed block's tokens that are `read` and the own tokens that are `present`."""
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
