"""DiagAttention: attention inside blocks of the sequence (TransNormer, arXiv:2210.10340)."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.by_platform import Form, by_platform
from brl_jax.attention.core.checks import (
    check_dtypes,
    check_lengths,
    check_qkv,
    check_scale,
    check_within,
    require,
    zero_padding,
)
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.core.products import CACHE_BYTES
from brl_jax.attention.core.query_blocks import in_blocks
from brl_jax.attention.core.scores import weights_dtype
from brl_jax.attention.core.softmax import softmax_weights
from brl_jax.attention.core.state import check_state
from brl_jax.fields import Count, declared

DiagScore = Literal["softmax", "relu"]


class DiagState(NamedTuple):
    """What `diag_attention` keeps of the tokens so far.

    Attributes:
      key, value: (B, block_size, K, H) and (B, block_size, K, V), the current block's tokens so far, then zeros.
      length: () int32, the number of tokens so far.
    """

    key: Float[Array, "B block K H"]
    value: Float[Array, "B block K V"]
    length: Int[Array, ""]


@declared
def init_diag_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    block_size: Count = 64,
    dtype: Any = jnp.float32,
) -> DiagState:
    """The state of `diag_attention` before the first token.

    Args:
      value_dim: head_dim of the values; head_dim by default.

    Raises:
      ValueError: a size is below 1.
    """
    tokens, value_dim = (batch, block_size, num_kv_heads), head_dim if value_dim is None else value_dim
    key, value = (jnp.zeros((*tokens, size), dtype) for size in (head_dim, value_dim))
    return DiagState(key, value, jnp.zeros((), jnp.int32))


@attention_function
def diag_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    block_size: Count = 64,
    scale: float | None = None,
    score: DiagScore = "softmax",
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    state: DiagState | None = None,
    return_state: bool = False,
    count: Int[Array, ""] | int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], DiagState]:
    """Attention of each token to the tokens of its block, i // block_size; O(T block_size) time and memory.

    (B, T, N, H), (B, T, K, H), (B, T, K, V) -> (B, T, N, V)::

        out = diag_attention(query, key, value, block_size=64, is_causal=True)

    out_i = sum_j p_ij v_j over the block (up to i if causal). The weights p are softmax(scale q k^T) with "softmax"
    (TransNormer T2, arXiv:2210.10340, section 4.3) or ReLU(scale q k^T) with "relu" (its T1, which is ReLA, Zhang et
    al. 2021, arXiv:2104.07012; ReLA's norm of the merged heads is left to the caller).

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, T, K, H) and (B, T, K, V) in query's dtype; K divides N.
      block_size: the number of tokens in a block; the last block may be shorter.
      scale: multiplies the scores; 1 / sqrt(H) by default.
      score: "softmax", or "relu", whose weights are not normalised.
      is_causal: query i sees only keys up to i.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; later queries and keys are padding. Padded rows give 0.
      state: the tokens of earlier calls, from `init_diag_state` or such a call; needs is_causal=True and no lengths.
        Any number of tokens may follow, such as one.
      return_state: also return the `DiagState` after these tokens.
      count: with state or return_state, how many of the T tokens exist, from the first one; None for all. The outputs
        of the others are undefined.
      implementation: None or "xla"; products of whole blocks need no kernel.

    Returns:
      (B, T, N, V) in query's dtype; scores and sums are float32. With return_state, also a `DiagState`.

    Raises:
      ValueError: arguments do not fit together.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    require(
        query.shape[1] == key.shape[1],
        f"key must have query's length {query.shape[1]}, got {key.shape[1]}: blocks contain both",
    )
    check_implementation(implementation, None, "xla")
    batch = query.shape[0]
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, batch)
    key_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    if state is not None or return_state:
        require(
            is_causal and query_lengths is None and key_lengths is None,
            "state and return_state must be given with is_causal=True and without lengths",
        )
        sizes = (batch, *key.shape[2:], value.shape[3])
        state = check_state(state, init_diag_state, *sizes, block_size=block_size, dtype=key.dtype)
        rule = _Rule(score, check_scale(scale, query.shape[3]), is_causal=True)
        out, state = _continue_from(state, int(block_size), rule, query, key, value, count)
        return (out, state) if return_state else out
    require(count is None, "count must be None without state and return_state")
    rule = _Rule(score, check_scale(scale, query.shape[3]), bool(is_causal))
    return _whole_blocks(rule, block_size, query, key, value, query_lengths, key_lengths)


def _whole_blocks(
    rule: _Rule,
    block_size: int,
    query: Array,
    key: Array,
    value: Array,
    query_lengths: Array | None = None,
    key_lengths: Array | None = None,
) -> Float[Array, "B T N V"]:
    """Attention of tokens that start at the beginning of a block."""
    batch, length = query.shape[:2]
    block = min(int(block_size), length)
    blocks = -(-length // block)

    def cut(x: Array, lengths: Array | None) -> Array:
        return in_blocks(zero_padding(x, lengths), block)

    ends = jnp.full((1,), length, jnp.int32) if key_lengths is None else jnp.minimum(key_lengths, length)
    inside = jnp.arange(blocks * block).reshape(1, blocks, block) < ends[:, None, None]
    out = _attend(rule, cut(query, query_lengths), cut(key, key_lengths), cut(value, key_lengths), inside)
    return zero_padding(out.reshape(batch, -1, *out.shape[3:])[:, :length], query_lengths)


def _continue_from(
    state: DiagState, block: int, rule: _Rule, query: Array, key: Array, value: Array, count: Any
) -> tuple[Float[Array, "B T N V"], DiagState]:
    length = query.shape[1]
    place = state.length % block
    check_within("count", count, length)
    # int32 whatever count's dtype is, because the state's length must keep its type.
    end = place + jnp.asarray(length if count is None else count, jnp.int32)
    # Enough whole blocks for the new tokens, wherever in the first block they start.
    size = -(-(block - 1 + length) // block) * block

    def extend(old: Array, new: Array) -> Array:
        old = jnp.pad(old, ((0, 0), (0, size - block), (0, 0), (0, 0)))
        extended = lax.dynamic_update_slice_in_dim(old, new, place, axis=1)
        return zero_padding(extended, jnp.broadcast_to(end, (key.shape[0],)))

    keys, values = extend(state.key, key), extend(state.value, value)
    if length == 1:
        seen = (jnp.arange(block) <= place)[None, None]
        out = _attend(rule._replace(is_causal=False), query[:, None], keys[:, None], values[:, None], seen)[
            :, 0
        ]
    else:
        rows = jnp.zeros((query.shape[0], size, *query.shape[2:]), query.dtype)
        rows = lax.dynamic_update_slice_in_dim(rows, query, place, axis=1)
        out = _whole_blocks(rule, block, rows, keys, values)
        out = lax.dynamic_slice_in_dim(out, place, length, axis=1)

    def current(extended: Array) -> Array:
        return lax.dynamic_slice_in_dim(extended, end // block * block, block, axis=1)

    left = jnp.broadcast_to(end % block, (key.shape[0],))
    # If the tokens complete the last block, `current` returns that block, and all of it is set to zero.
    total = state.length + (end - place)
    return out, DiagState(zero_padding(current(keys), left), zero_padding(current(values), left), total)


class _Rule(NamedTuple):
    """How to compute the weights inside a block from the scores."""

    score: DiagScore
    scale: float
    is_causal: bool


# Compiled on its own, so that calls outside jit are traced once.
@functools.partial(jax.jit, static_argnums=0)
def _attend(
    rule: _Rule,
    query: Float[Array, "B C t N H"],
    key: Float[Array, "B C s K H"],
    value: Float[Array, "B C s K V"],
    inside: Bool[Array, "#B C s"],
) -> Float[Array, "B C t N V"]:
    """Attention within each of C blocks to its keys `inside`. The backward pass recomputes the scores."""
    return by_platform(
        lambda platform, *_: _form(rule, _few_at_a_time if platform == "cpu" else _all_at_once),
        query,
        key,
        value,
        inside,
        results=jax.ShapeDtypeStruct((*query.shape[:4], value.shape[4]), query.dtype),
        plain=functools.partial(_blocks, rule),
    )


def _form(rule: _Rule, over_blocks: Callable[..., Any]) -> Form:
    def gradients(query, key, value, inside, d_out):
        _, pull = jax.vjp(lambda q, k, v: _blocks(rule, q, k, v, inside), query, key, value)
        return pull(d_out)

    def gradient(operands: Any, out: Array, kept: Any, d_out: Array) -> tuple[Array, Array, Array, None]:
        return *over_blocks(gradients, *operands, d_out), None

    return Form(lambda *arrays: (over_blocks(functools.partial(_blocks, rule), *arrays), ()), gradient)


def _all_at_once(function: Callable[..., Any], *arrays: Array) -> Any:
    return function(*arrays)


def _few_at_a_time(function: Callable[..., Any], *arrays: Array) -> Any:
    """function(*arrays) on groups of blocks (axis 1) whose scores fit into a CPU's cache: at 32k tokens, twice as
    fast as all blocks at once."""
    query, key = arrays[:2]
    batch, blocks, rows, heads = query.shape[:4]
    groups = -(-blocks // max(1, CACHE_BYTES // (4 * batch * heads * rows * key.shape[2])))
    size = -(-blocks // groups)

    padding = (0, groups * size - blocks)
    padded = [jnp.pad(a, [(0, 0), padding] + [(0, 0)] * (a.ndim - 2)) for a in arrays]

    def group(i: Array) -> Any:
        return function(*(lax.dynamic_slice_in_dim(a, i * size, size, axis=1) for a in padded))

    def join(x: Array) -> Array:
        return jnp.moveaxis(x, 0, 1).reshape(batch, groups * size, *x.shape[3:])[:, :blocks]

    return jax.tree.map(join, lax.map(group, jnp.arange(groups, dtype=jnp.int32)))


def _blocks(rule: _Rule, query: Array, key: Array, value: Array, inside: Array) -> Array:
    batch, blocks, rows, heads, head_dim = query.shape
    keys, kv_heads = key.shape[2:4]
    grouped = query.reshape(batch, blocks, rows, kv_heads, heads // kv_heads, head_dim)
    logits = jnp.einsum("bctkgh,bcskh->bckgts", grouped, key, preferred_element_type=jnp.float32)
    logits = logits * rule.scale
    mask = inside[:, :, None, None, None]
    if rule.is_causal:
        mask = mask & jnp.tri(rows, keys, dtype=bool)[None, None, None, None]
    weights = (
        softmax_weights(logits, mask)
        if rule.score == "softmax"
        else jnp.where(mask, jax.nn.relu(logits), jnp.zeros((), logits.dtype))
    )
    kept = weights_dtype(value.dtype, rule.score)
    out = jnp.einsum(
        "bckgts,bcskv->bctkgv", weights.astype(kept), value.astype(kept), preferred_element_type=jnp.float32
    )
    return out.reshape(*query.shape[:4], -1).astype(query.dtype)
