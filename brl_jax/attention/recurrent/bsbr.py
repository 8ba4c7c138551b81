"""BSBR: softmax attention inside chunks, and retrieval of whole chunks between them (the BSBR article)."""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Bool, DTypeLike, Float, Int

from brl_jax.attention.core.checks import check_qkv, check_scale, require, zero_padding
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.query_blocks import in_blocks
from brl_jax.attention.core.softmax import softmax_weights
from brl_jax.attention.core.state import check_state, write_places
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.patterns import BlockDiagonal
from brl_jax.attention.recurrent.arguments import prepare_inputs
from brl_jax.attention.recurrent.chunk_pieces import ChunkToken, align_prompt, read_new
from brl_jax.attention.recurrent.chunk_scan import ChunkVisibility
from brl_jax.attention.recurrent.rows import group_rows, heads_first, ungroup_rows
from brl_jax.fields import Count, declared
from brl_jax.sharding import sequence_axis

#: Arrays (H, V, F) and (F, H, V), which map a chunk's key-value product to F numbers and back.
Compression = tuple[Float[Array, "H V F"], Float[Array, "F H V"]]


class BSBRState(NamedTuple):
    """What `bsbr_attention` keeps of the tokens so far: a summary of each completed chunk, and the current chunk.

    Attributes:
      summary: the key-value products of the completed chunks, with F = H V, or the F numbers that they are
        compressed to.
      retrieval_key: the retrieval keys of those chunks.
      retrieved: what the current chunk's queries read from earlier chunks.
      key, value: the current chunk's keys and values, at their positions in the chunk.
      length: the number of tokens so far in each row.
    """

    summary: Float[Array, "B M K F"]
    retrieval_key: Float[Array, "B M K R"]
    retrieved: Float[Array, "B N H V"]
    key: Float[Array, "B C K H"]
    value: Float[Array, "B C K V"]
    length: Int[Array, "B"]


@declared
def init_bsbr_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    value_dim: Count | None = None,
    *,
    length: Count,
    num_heads: Count | None = None,
    retrieval_dim: Count | None = None,
    num_compressed: Count | None = None,
    chunk_size: Count = 64,
    dtype: DTypeLike = jnp.float32,
) -> BSBRState:
    """Returns the state of `bsbr_attention` before the first of up to `length` tokens.

    Args:
      value_dim: V, the head_dim of the values; head_dim by default.
      num_heads: heads of the queries; num_kv_heads by default.
      retrieval_dim: R, the features of retrieval queries and keys; head_dim by default.
      num_compressed: F, if the calls have a `compression`.
      chunk_size: C, as in the calls.
      dtype: of queries, keys and values; summaries are float32.

    Raises:
      ValueError: a size is below 1.
    """
    num_heads = num_kv_heads if num_heads is None else num_heads
    retrieval_dim = head_dim if retrieval_dim is None else retrieval_dim
    value_dim = head_dim if value_dim is None else value_dim
    numbers = head_dim * value_dim if num_compressed is None else num_compressed
    chunks = -(-length // chunk_size)
    return BSBRState(
        jnp.zeros((batch, chunks, num_kv_heads, numbers), jnp.float32),
        jnp.zeros((batch, chunks, num_kv_heads, retrieval_dim), dtype),
        jnp.zeros((batch, num_heads, head_dim, value_dim), jnp.float32),
        jnp.zeros((batch, chunk_size, num_kv_heads, head_dim), dtype),
        jnp.zeros((batch, chunk_size, num_kv_heads, value_dim), dtype),
        jnp.zeros((batch,), jnp.int32),
    )


@attention_function
def bsbr_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    retrieval_query: Float[Array, "B T N R"],
    retrieval_key: Float[Array, "B T K R"],
    *,
    compression: Compression | None = None,
    strength: Float[Array, "N"] | float = 1.0,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    state: BSBRState | None = None,
    return_state: bool = False,
    chunk_size: Count = 64,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], BSBRState]:
    """Softmax attention inside chunks of C tokens and retrieval between them, in O(T C + (T / C)^2) time.

    (B, T, N, H), (B, T, K, H), (B, T, K, V), (B, T, N, R), (B, T, K, R) -> (B, T, N, V)::

        out = bsbr_attention(query, key, value, retrieval_query, retrieval_key, is_causal=True)

      out_i = softmax(scale q_i K_c^T) V_c + strength scale q_i sum_c' p_cc' F_c'
      p_c = softmax(r_c h_c'^T / sqrt(R)),  F_c' = K_c'^T V_c'

    c is the chunk of token i, with keys up to i if causal. It retrieves from the chunks c' < c if causal, else from
    all other chunks. r_c is the retrieval query of a chunk's first token and h_c' the retrieval key of its last token.
    The first chunk of a causal call retrieves 0.

    This follows the section "Technical Implementation Insights" of the BSBR article, with the masks of its text;
    the masks of its public code let tokens see later ones.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, T, K, H) and (B, T, K, V) of the same dtype; K divides N.
      retrieval_query, retrieval_key: (B, T, N, R) and (B, T, K, R) of the same dtype. Only the first and last token
        of each chunk matter.
      compression: arrays (H, V, F) and (F, H, V), which compress F_c to F numbers and expand them after retrieval;
        None keeps F_c.
      strength: factor of the retrieved part, (N,) or (). F_c is a sum over C tokens, so 1 / C makes it a mean.
      scale: scale of the scores; 1 / sqrt(H) by default.
      is_causal, key_value_seq_lengths: as for `linear_attention`.
      state: from `init_bsbr_state` or an earlier call; causal only.
      return_state: also return the state after these tokens; needs a state, which limits the number of tokens.
      chunk_size: C, which changes the result; chunks are counted from the first token of the sequence.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    prepared = prepare_inputs(
        query, key, value, is_causal=is_causal, key_value_seq_lengths=key_value_seq_lengths, state=state,
        return_state=return_state, implementation=implementation, same_tokens=True,
    )  # fmt: skip
    _check_retrieval(query, key, value, retrieval_query, retrieval_key, compression)
    heads, head_dim = query.shape[2:]
    scale = check_scale(scale, head_dim)
    strength = jnp.asarray(strength, jnp.float32)
    require(
        strength.shape in ((), (heads,)), f"strength must have shape ({heads},) or (), got {strength.shape}"
    )
    lengths = prepared.lengths
    inputs = {
        "query": prepared.query,
        "key": prepared.key,
        "value": prepared.value,
        "retrieval_query": zero_padding(retrieval_query, lengths),
        "retrieval_key": zero_padding(retrieval_key, lengths),
    }
    retrieval = _Retrieval(compression, strength * scale)
    if state is None and not return_state:
        near = local_attention(
            inputs["query"], inputs["key"], inputs["value"], pattern=BlockDiagonal(chunk_size),
            is_causal=is_causal, scale=scale, key_value_seq_lengths=lengths, implementation=implementation,
        )  # fmt: skip
        far = _between_chunks(inputs, lengths, (compression, strength * scale), is_causal, chunk_size)
        return near + far.astype(query.dtype)
    require(state is not None, "return_state needs a state, which determines the largest number of tokens")
    _check_bsbr_state(state, inputs, compression, chunk_size)

    def token(state: BSBRState, new: Any, visibility: ChunkVisibility) -> tuple[BSBRState, Array]:
        return _token(new, state, visibility, retrieval, scale)

    def prompt(state: BSBRState, inputs: dict[str, Array], segments: Array | None) -> Any:
        return _prompt(inputs, state, segments, retrieval, scale, chunk_size, implementation)

    state, out = read_new(token, prompt, state, inputs, prepared.segments)
    return (out, state) if return_state else out


class _Retrieval(NamedTuple):
    """Reads matrices from earlier chunks' key-value products.

    Attributes:
      compression: as given to `bsbr_attention`.
      factor: the strength times the scale of the scores, () or (N,).
    """

    compression: Compression | None
    factor: Float[Array, "*N"]

    def summarize(self, product: Float[Array, "*B K H V"]) -> Float[Array, "*B K F"]:
        """The product's entries, compressed if asked for."""
        if self.compression is None:
            return product.reshape(*product.shape[:-2], -1)
        return jnp.einsum("...khv,hvs->...ks", product, self.compression[0].astype(product.dtype))

    def mix(
        self,
        query: Float[Array, "B I N R"],
        key: Float[Array, "B M K R"],
        summary: Float[Array, "B M K F"],
        seen: Bool[Array, "#B I M"],
        size: tuple[int, int],
    ) -> Float[Array, "B I N H V"]:
        """The matrix that each query head reads, for I retrieval queries over the M chunks that they see."""
        batch, count, heads, features = query.shape
        grouped = query.reshape(batch, count, key.shape[2], -1, features).astype(jnp.float32)
        logits = jnp.einsum("bikgr,bmkr->bkgim", grouped, key.astype(jnp.float32)) / math.sqrt(features)
        weights = softmax_weights(logits, seen[:, None, None])
        mixed = jnp.einsum("bkgim,bmks->bikgs", weights, summary).reshape(batch, count, heads, -1)
        if self.compression is None:
            return mixed.reshape(batch, count, heads, *size)
        return jnp.einsum("bins,shv->binhv", mixed, self.compression[1].astype(mixed.dtype))

    def read(
        self, query: Float[Array, "B *C N H"], matrix: Float[Array, "B *#C N H V"]
    ) -> Float[Array, "B *C N V"]:
        read = jnp.einsum("...nh,...nhv->...nv", query.astype(matrix.dtype), matrix)
        factor = jnp.broadcast_to(self.factor, query.shape[-2:-1])
        return read * factor.reshape((1,) * (read.ndim - 2) + (-1, 1))


def _between_chunks(
    inputs: dict[str, Array], lengths: Array | None, retrieval: Any, is_causal: bool, chunk_size: int
) -> Float[Array, "B T N V"]:
    """What a whole sequence's queries read from other chunks; `retrieval` contains the arrays of a `_Retrieval`.

    On a mesh that shards sequences, each device summarises its own chunks, and the summaries are gathered.
    """
    length = inputs["query"].shape[1]
    axis = sequence_axis(length, chunk_size)
    shard = functools.partial(
        _shard_between_chunks, length=length, is_causal=is_causal, chunk_size=chunk_size, axis=axis
    )
    if axis is None:
        return shard(inputs, lengths, retrieval)
    cut, whole = PartitionSpec(None, axis), PartitionSpec()
    mapped = jax.shard_map(shard, in_specs=(cut, whole, whole), out_specs=cut, axis_names={axis})
    return mapped(inputs, lengths, retrieval)


def _shard_between_chunks(
    inputs: dict[str, Array],
    lengths: Array | None,
    retrieval: Any,
    *,
    length: int,
    is_causal: bool,
    chunk_size: int,
    axis: str | None,
) -> Float[Array, "B T N V"]:
    """`_between_chunks` for one shard of sequences of `length` tokens; without an axis, for all of them."""
    retrieval = _Retrieval(*retrieval)
    batch, size = inputs["query"].shape[:2]
    chunks = -(-size // chunk_size)

    split = functools.partial(in_blocks, size=chunk_size)

    def gather(x: Array) -> Array:
        return x if axis is None else lax.all_gather(x, axis, axis=1, tiled=True)

    key, value = split(inputs["key"]).astype(jnp.float32), split(inputs["value"]).astype(jnp.float32)
    summary = retrieval.summarize(jnp.einsum("bmckh,bmckv->bmkhv", key, value))
    first = 0 if axis is None else lax.axis_index(axis) * chunks
    number = first + jnp.arange(chunks, dtype=jnp.int32)
    ends = jnp.full((1,), length) if lengths is None else jnp.minimum(lengths, length)
    # A partly filled chunk ends with its last token; no query sees an empty chunk.
    last = jnp.minimum((number[None] + 1) * chunk_size, ends[:, None]) - 1
    exists = number[None] * chunk_size <= last
    place = jnp.maximum(last - first * chunk_size, 0)
    keys = jnp.take_along_axis(inputs["retrieval_key"], place[..., None, None], axis=1)
    all_numbers = number if axis is None else jnp.arange(length // chunk_size, dtype=jnp.int32)
    earlier, other = all_numbers[None] < number[:, None], all_numbers[None] != number[:, None]
    seen = (earlier if is_causal else other)[None] & gather(exists)[:, None]
    queries = inputs["retrieval_query"][:, ::chunk_size]
    matrix = retrieval.mix(queries, gather(keys), gather(summary), seen, (key.shape[-1], value.shape[-1]))
    far = retrieval.read(split(inputs["query"]), matrix[:, :, None])
    return far.reshape(batch, chunks * chunk_size, *far.shape[3:])[:, :size]


def _prompt(
    inputs: dict[str, Array],
    state: BSBRState,
    segments: Int[Array, "B T"] | None,
    retrieval: _Retrieval,
    scale: float,
    chunk_size: int,
    implementation: Implementation | None,
) -> tuple[BSBRState, Float[Array, "B T N V"]]:
    """Computes many new tokens at once."""
    prompt = align_prompt(state.length, inputs["key"].shape[1], segments, chunk_size)
    aligned = {name: prompt.move(inputs[name]) for name in ("query", "retrieval_query", "retrieval_key")}
    aligned |= {name: prompt.move(inputs[name], getattr(state, name)) for name in ("key", "value")}
    near = local_attention(
        aligned["query"], aligned["key"], aligned["value"], pattern=BlockDiagonal(chunk_size), is_causal=True,
        scale=scale, key_value_seq_lengths=prompt.total[:, 0], implementation=implementation,
    )  # fmt: skip

    batch, size = aligned["key"].shape[:2]
    chunks, room = -(-size // chunk_size), state.summary.shape[1]

    def split(name: str) -> Array:
        return in_blocks(aligned[name], chunk_size)

    key, value = split("key").astype(jnp.float32), split("value").astype(jnp.float32)
    summary = retrieval.summarize(jnp.einsum("bmckh,bmckv->bmkhv", key, value))
    index = jnp.arange(chunks, dtype=jnp.int32)[None]
    number = state.length[:, None] // chunk_size + index
    slot = jnp.where((index + 1) * chunk_size <= prompt.total, number, room)
    summaries = write_places(state.summary, summary, slot)
    new_keys = split("retrieval_key")[:, :, -1]
    retrieval_key = write_places(state.retrieval_key, new_keys, slot)
    seen = jnp.arange(room, dtype=jnp.int32)[None, None] < number[..., None]
    queries = split("retrieval_query")[:, :, 0]
    matrix = retrieval.mix(queries, retrieval_key, summaries, seen, (key.shape[-1], value.shape[-1]))
    # If the first chunk began with an earlier token, it has already retrieved.
    begun = (prompt.filled > 0) & (index == 0)
    matrix = jnp.where(begun[..., None, None, None], state.retrieved[:, None], matrix)
    far = retrieval.read(split("query"), matrix[:, :, None])
    far = far.reshape(batch, chunks * chunk_size, *far.shape[3:])[:, :size]

    last = jnp.maximum(prompt.total - 1, 0) // chunk_size
    retrieved = jnp.take_along_axis(matrix, last[..., None, None, None], axis=1)[:, 0]
    current_key, current_value = (prompt.unfinished_chunk(aligned[name]) for name in ("key", "value"))
    length = state.length + prompt.new[:, 0]
    state = BSBRState(summaries, retrieval_key, retrieved, current_key, current_value, length)
    return state, prompt.restore((near + far).astype(near.dtype))


def _token(
    new: dict[str, Array], state: BSBRState, visibility: ChunkVisibility, retrieval: _Retrieval, scale: float
) -> tuple[BSBRState, Float[Array, "B 1 N V"]]:
    """One new token, anywhere in a chunk."""
    chunk_size, kv_heads, head_dim = state.key.shape[1:]
    place = ChunkToken.of(state.length, visibility.enters_state, chunk_size)
    slots = [place.put(getattr(state, name), new[name]) for name in ("key", "value")]
    key, value = map(heads_first, slots)
    logits = scale * jnp.einsum("bkrh,bksh->bkrs", group_rows(new["query"], kv_heads), key)
    weights = softmax_weights(logits, place.sees(chunk_size)[:, None])
    near = ungroup_rows(jnp.einsum("bkrs,bksv->bkrv", weights, value), 1)

    room = state.summary.shape[1]
    slot = jnp.where(place.completes, place.chunk, room)[:, None]
    summary = retrieval.summarize(jnp.einsum("bksh,bksv->bkhv", key, value))
    summaries = write_places(state.summary, summary[:, None], slot)
    retrieval_key = write_places(state.retrieval_key, new["retrieval_key"], slot)
    begins = place.place == 0

    def retrieve() -> Array:
        # Reading the old arrays would prevent in-place writes. A chunk that this token completes is masked, as it is
        # not earlier than itself.
        seen = jnp.arange(room, dtype=jnp.int32)[None, None] < place.chunk[:, None, None]
        size = head_dim, value.shape[-1]
        matrix = retrieval.mix(new["retrieval_query"], retrieval_key, summaries, seen, size)[:, 0]
        return jnp.where(begins[:, None, None, None], matrix, state.retrieved)

    # Read all summaries only once per chunk, when it begins.
    retrieved = lax.cond(jnp.any(begins), retrieve, lambda: state.retrieved)
    out = near + retrieval.read(new["query"], retrieved[:, None])
    length = state.length + place.exists.astype(jnp.int32)
    kept_key, kept_value = map(place.kept, slots)
    state = BSBRState(summaries, retrieval_key, retrieved, kept_key, kept_value, length)
    return state, out.astype(new["query"].dtype)


def _check_retrieval(
    query: Array, key: Array, value: Array, retrieval_query: Array, retrieval_key: Array, compression: Any
) -> None:
    names = ("retrieval_query", "retrieval_key", "value")
    check_qkv(retrieval_query, retrieval_key, value, names)
    for name, array, like in zip(names, (retrieval_query, retrieval_key), (query, key)):
        require(
            array.shape[:3] == like.shape[:3] and array.dtype == like.dtype,
            f"{name} must be {like.dtype} of shape {(*like.shape[:3], 'R')}, got {array.dtype} of shape {array.shape}",
        )
    if compression is None:
        return
    require(
        isinstance(compression, (tuple, list)) and len(compression) == 2,
        f"compression must be None or a pair of arrays, got {type(compression).__name__}",
    )
    down, up = compression
    sizes = (key.shape[3], value.shape[3])
    require(
        down.ndim == 3 and down.shape[:2] == sizes and up.shape == (down.shape[2], *sizes),
        f"compression must be arrays of shapes {(*sizes, 'F')} and {('F', *sizes)}, got {down.shape} and {up.shape}",
    )


def _check_bsbr_state(state: Any, inputs: Any, compression: Compression | None, chunk_size: int) -> None:
    query, key = inputs["query"], inputs["key"]
    length = max(state.summary.shape[1] * chunk_size, query.shape[1])
    check_state(
        state, init_bsbr_state, query.shape[0], key.shape[2], key.shape[3], inputs["value"].shape[3],
        length=length, num_heads=query.shape[2], retrieval_dim=inputs["retrieval_key"].shape[3],
        num_compressed=None if compression is None else compression[0].shape[2],
        chunk_size=chunk_size, dtype=query.dtype,
    )  # fmt: skip
