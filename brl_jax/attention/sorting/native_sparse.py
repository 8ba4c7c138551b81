"""Native sparse attention: compressed blocks, the blocks they choose, and a window (Yuan et al. 2025)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.checks import check_dtypes, check_qkv, check_scale, check_segments, require
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.query_blocks import by_query_blocks
from brl_jax.attention.core.segments import first_tokens
from brl_jax.attention.core.softmax import softmax_weights
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.attention.sorting.selected import selected_attention
from brl_jax.fields import Count, check_value, declared

# Queries at a time: their scores for all compressed blocks are in memory together.
_QUERY_BLOCK = 64
# Blocks that every query reads whatever their weight: its own, the one before it, and the sequence's first.
_FIXED = 3
# Implementations of the window that also exist for the chosen blocks.
_OF_BLOCKS = ("xla", "pallas", "pallas_interpret", "triton", "triton_interpret")


class BlockSizes(NamedTuple):
    """Block sizes in tokens, and a number of blocks.

    Attributes:
      compressed: tokens in a compressed block [l].
      stride: tokens from the start of one compressed block to the next [d].
      selected: tokens in a block that is chosen as a whole [l'].
      blocks: how many blocks each query reads [n], including the fixed ones.
    """

    compressed: int = 32
    stride: int = 16
    selected: int = 64
    blocks: int = 16

    def check(self) -> None:
        """Raises ValueError for sizes below 1 or not multiples of the stride."""
        for name, size in self._asdict().items():
            check_value(f"sizes.{name}", size, Count)
        for name in ("compressed", "selected"):
            size = getattr(self, name)
            require(
                size % self.stride == 0,
                f"sizes.{name} must be a multiple of sizes.stride={self.stride}, got {size}",
            )


DEFAULT_SIZES = BlockSizes()


def _checked_ids(segment_ids: Any, x: Array) -> Int[Array, "B T"] | None:
    """Returns the segment ids of the tokens x (B, T, ...) in int32."""
    require(
        not isinstance(segment_ids, (tuple, list)),
        f"segment_ids must be one array for queries and keys, got {type(segment_ids).__name__}",
    )
    return check_segments(segment_ids, x.shape, x.shape)[0]


class Tokens(NamedTuple):
    """Keys and values, of tokens or of compressed blocks."""

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K V"]


class Lists(NamedTuple):
    """First tokens of blocks, ascending; entries beyond the last block are past the row's end.

    Attributes:
      compressed: of the compressed blocks.
      candidates: of the whole blocks that can be chosen.
      first: (B, T), the first token of each query's sequence.
    """

    compressed: Int[Array, "#B C"]
    candidates: Int[Array, "#B J"]
    first: Int[Array, "B T"]


def block_starts(
    length: int, size: int, stride: int, segment_ids: Int[Array, "B T"] | None = None
) -> Int[Array, "#B C"]:
    """The first tokens of all whole blocks of `size` tokens, one every `stride` tokens of a sequence, ascending.

    Packed rows have at most length // stride of them, because stride <= size; missing entries are `length`.
    """
    if segment_ids is None:
        return (jnp.arange(max((length - size) // stride + 1, 0), dtype=jnp.int32) * stride)[None]
    first = first_tokens(segment_ids)
    places = jnp.arange(length, dtype=jnp.int32)[None]
    last = jnp.take(first, jnp.minimum(places[0] + size - 1, length - 1), axis=1)
    whole = ((places - first) % stride == 0) & (last == first) & (places + size <= length)
    return jnp.sort(jnp.where(whole, places, length), axis=1)[:, : length // stride]


def gather_blocks(
    x: Float[Array, "B S K H"], starts: Int[Array, "#B C"], size: int
) -> Float[Array, "B C L K H"]:
    """The `size` tokens from each start on; beyond the row's end, its last token."""
    places = jnp.minimum(starts[..., None] + jnp.arange(size, dtype=jnp.int32)[None, None], x.shape[1] - 1)
    if places.shape[0] == 1:
        return jnp.take(x, places[0], axis=1)
    return jax.vmap(lambda x, places: jnp.take(x, places, axis=0))(x, places)


@declared
def compression_blocks(
    x: Float[Array, "B T K H"],
    sizes: BlockSizes = DEFAULT_SIZES,
    segment_ids: Int[Array, "B T"] | None = None,
) -> Float[Array, "B C L K H"]:
    """Cuts out the blocks to compress; `native_sparse_attention` takes one key and value for each.

    (B, T, K, H) -> (B, C, L, K, H)::

        out = compression_blocks(x)  # out.mean(axis=2) is the simplest compressed key or value of each block

    Args:
      x: keys or values.
      sizes, segment_ids: as for `native_sparse_attention`.

    Returns:
      (B, C, L, K, H): C blocks of L = sizes.compressed tokens. In packed rows, entries after the last block are
      arbitrary and never read.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    sizes.check()
    segment_ids = _checked_ids(segment_ids, x)
    return gather_blocks(
        x, block_starts(x.shape[1], sizes.compressed, sizes.stride, segment_ids), sizes.compressed
    )


def _candidate_scores(
    weights: Float[Array, "B T K C"], lists: Lists, sizes: BlockSizes
) -> Float[Array, "B T K J"]:
    """Sums for each candidate the weights of overlapping compressed blocks, times the strides they share (eq. 9)."""
    starts, candidates = lists.compressed, lists.candidates
    overlapping = (sizes.compressed + sizes.selected) // sizes.stride - 1
    begin = jax.vmap(jnp.searchsorted)(starts, candidates - sizes.compressed + 1).astype(jnp.int32)
    places = begin[..., None] + jnp.arange(overlapping, dtype=jnp.int32)[None, None]
    # Do not count the last compressed block again for places past it.
    missing = places >= starts.shape[1]
    places = jnp.minimum(places, starts.shape[1] - 1)
    low = jax.vmap(lambda starts, places: jnp.take(starts, places))(starts, places)
    block = candidates[..., None]
    shared = jnp.minimum(low + sizes.compressed, block + sizes.selected) - jnp.maximum(low, block)
    shared = jnp.where(missing, 0, jnp.maximum(shared, 0) // sizes.stride).astype(weights.dtype)
    if places.shape[0] == 1:
        return jnp.einsum("btkjr,jr->btkj", jnp.take(weights, places[0], axis=-1), shared[0])
    return jax.vmap(
        lambda weights, places, shared: jnp.einsum("tkjr,jr->tkj", jnp.take(weights, places, axis=-1), shared)
    )(weights, places, shared)


def choose_blocks(
    weights: Float[Array, "B T K C"],
    lists: Lists,
    first: Int[Array, "B T"],
    positions: Int[Array, " T"],
    sizes: BlockSizes,
) -> tuple[Int[Array, "B T K M"], Bool[Array, "B T K M"]]:
    """The first tokens of the blocks that each query reads, and which of these blocks exist (eqs. 10, 11).

    Args:
      weights: of the compressed blocks, summed over the query heads that share a key head.
      first: first tokens of the queries' sequences.
      positions: of the queries.
    """
    batch, length, kv_heads, _ = weights.shape
    own = first + (positions[None] - first) // sizes.selected * sizes.selected
    fixed = jnp.stack([own, own - sizes.selected, first], -1)
    exists = jnp.stack([own >= first, own > first, own - sizes.selected > first], -1)
    fixed, exists = (
        jnp.broadcast_to(x[:, :, None, : sizes.blocks], (batch, length, kv_heads, min(_FIXED, sizes.blocks)))
        for x in (fixed, exists)
    )
    free = min(max(sizes.blocks - _FIXED, 0), lists.candidates.shape[1])
    if free == 0:
        return fixed, exists
    if weights.shape[3] == 0:
        scores = jnp.zeros((batch, length, kv_heads, lists.candidates.shape[1]), weights.dtype)
    else:
        scores = _candidate_scores(weights, lists, sizes)
    candidates = lists.candidates[:, None]
    eligible = (candidates > first[..., None]) & (candidates < (own - sizes.selected)[..., None])
    scores = jnp.where(eligible[:, :, None], scores, -1.0)
    best, places = lax.top_k(scores, free)
    rows = jnp.broadcast_to(candidates[:, :, None], scores.shape)
    chosen = jnp.take_along_axis(rows, places, axis=-1)
    return jnp.concatenate([fixed, chosen], -1), jnp.concatenate([exists, best >= 0], -1)


def far_attention(
    query: Float[Array, "B T N H"],
    compressed: Tokens,
    tokens: Tokens,
    lists: Lists,
    sizes: BlockSizes,
    scale: float,
    offset: Any = 0,
    *,
    aligned: bool = False,
    implementation: Implementation | None = None,
) -> tuple[Float[Array, "B T N V"], Float[Array, "B T N V"]]:
    """What queries read from compressed blocks, and from the blocks chosen by them, in float32.

    Args:
      tokens: all tokens up to the queries' own.
      lists: positions are counted from the first of these tokens.
      offset: position of the first query.
      aligned: whether all sequences begin at the first token.
      implementation: of the window; applies to the chosen blocks too if they have such a kernel.
    """
    num_keys, kv_heads = tokens.key.shape[1:3]

    def attend(query: Array, first: Any, offset: Any) -> tuple[Array, Array]:
        batch, length, heads, head_dim = query.shape
        positions = offset + jnp.arange(length, dtype=jnp.int32)
        rows = query.reshape(batch, length, kv_heads, heads // kv_heads, head_dim)
        scores = jnp.einsum("btkgh,bckh->btkgc", rows, compressed.key, preferred_element_type=jnp.float32)
        starts = lists.compressed[:, None]
        seen = (starts >= first[..., None]) & (starts + sizes.compressed <= positions[None, :, None] + 1)
        weights = softmax_weights(scores * scale, seen[:, :, None, None])
        far = jnp.einsum(
            "btkgc,bckv->btkgv",
            weights.astype(compressed.value.dtype),
            compressed.value,
            preferred_element_type=jnp.float32,
        )
        # The choice of blocks has no gradient.
        shared = lax.stop_gradient(weights.sum(3))
        chosen, exists = choose_blocks(shared, lists, first, positions, sizes)
        return far.reshape(batch, length, heads, -1), jnp.where(exists, chosen, num_keys)

    far, chosen = by_query_blocks(attend, _QUERY_BLOCK, query, lists.first, offset)
    near = selected_attention(
        query,
        *tokens,
        chosen,
        offset,
        size=sizes.selected,
        scale=scale,
        aligned=aligned,
        implementation=implementation if implementation in _OF_BLOCKS else None,
    )
    return far, near


@attention_function
def native_sparse_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    compressed_key: Float[Array, "B C K H"],
    compressed_value: Float[Array, "B C K V"],
    gates: Float[Array, "B T N 3"],
    *,
    sizes: BlockSizes = DEFAULT_SIZES,
    window: Count = 512,
    window_key: Float[Array, "B T K H"] | None = None,
    window_value: Float[Array, "B T K V"] | None = None,
    scale: float | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Causal attention to compressed blocks, to the blocks of tokens that these choose, and to a window.

    (B, T, N, H), (B, T, K, H), (B, T, K, V), (B, C, K, H), (B, C, K, V), (B, T, N, 3) -> (B, T, N, V)::

        few_key, few_value = (compression_blocks(x).mean(axis=2) for x in (key, value))
        out = native_sparse_attention(query, key, value, few_key, few_value, gates)

      out_t = g_1 softmax(scale q_t K_c^T) V_c + g_2 softmax(scale q_t K_s^T) V_s + g_3 softmax(scale q_t K_w^T) V_w

    Native Sparse Attention (Yuan et al. 2025, arXiv:2502.11089), eqs. 3 to 12.

    K_c has one key per block of sizes.compressed tokens, every sizes.stride tokens, that ends at or before t. K_s
    are the keys up to t in sizes.blocks blocks of sizes.selected tokens: the block of t, the one before it, the
    sequence's first, and the blocks with the largest sum of K_c's weights over the query heads of a key head. (In
    eq. 9 as printed, the first index has the wrong sign.) Choosing has no gradient. K_w are the keys of the window:
    t and the window - 1 tokens before it.

    Time is O(T (window + sizes.blocks sizes.selected) + T^2 / sizes.stride). Memory is linear in T, apart from the
    scores of 64 queries for all compressed blocks.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, T, K, H) and (B, T, K, V), the tokens whose blocks are chosen; K divides N.
      compressed_key, compressed_value: (B, C, K, H) and (B, C, K, V), one for each block of `compression_blocks`.
      gates: (B, T, N, 3), weights of the compressed blocks, the chosen blocks and the window.
      sizes, window: as above.
      window_key, window_value: keys and values for the window; `key` and `value` by default.
      scale: scale of the scores; 1 / sqrt(H) by default.
      segment_ids: (B, T) ints, equal within a sequence, if a row contains several. Blocks are counted from a
        sequence's first token, and no token sees another sequence.
      implementation: for the window, as for `local_attention`. "xla", "pallas" and "triton" also apply to the
        chosen blocks, which otherwise use a kernel on TPUs and GPUs, and XLA elsewhere. Compressed blocks always
        run through XLA.

    Returns:
      (B, T, N, V) in the query's dtype, with float32 softmax and gates.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    sizes.check()
    batch, length, heads, head_dim = query.shape
    kv_heads = key.shape[2]
    require(key.shape[1] == length, f"key must have query's length {length}, got {key.shape[1]}")
    segment_ids = _checked_ids(segment_ids, key)
    starts = block_starts(length, sizes.compressed, sizes.stride, segment_ids)
    window_key = key if window_key is None else window_key
    window_value = value if window_value is None else window_value
    expected = {
        "compressed_key": (compressed_key, (batch, starts.shape[1], kv_heads, head_dim)),
        "compressed_value": (compressed_value, (batch, starts.shape[1], *value.shape[2:])),
        "window_key": (window_key, key.shape),
        "window_value": (window_value, value.shape),
        "gates": (gates, (batch, length, heads, 3)),
    }
    for name, (array, shape) in expected.items():
        require(array.shape == shape, f"{name} must have shape {shape}, got {array.shape}")
    scale = check_scale(scale, head_dim)
    first = jnp.zeros((batch, length), jnp.int32) if segment_ids is None else first_tokens(segment_ids)
    lists = Lists(starts, block_starts(length, sizes.selected, sizes.selected, segment_ids), first)
    far, near = far_attention(
        query,
        Tokens(compressed_key, compressed_value),
        Tokens(key, value),
        lists,
        sizes,
        scale,
        aligned=segment_ids is None,
        implementation=implementation,
    )
    last = local_attention(
        query,
        window_key,
        window_value,
        pattern=SlidingWindow(window - 1, 0),
        is_causal=True,
        scale=scale,
        segment_ids=segment_ids,
        implementation=implementation,
    )
    return mix_branches(gates, far, near, last).astype(query.dtype)


def mix_branches(gates: Float[Array, "B T N 3"], *branches: Array) -> Float[Array, "B T N V"]:
    """The sum of the branches' outputs, each times its gate, in float32."""
    weights = gates.astype(jnp.float32)
    parts = [weights[..., i, None] * branch.astype(jnp.float32) for i, branch in enumerate(branches)]
    return sum(parts[1:], parts[0])
