"""BSBR: softmax attention inside chunks, and whole chunks retrieved from between them (004, the BSBR article)."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.arguments import check_scale, zero_padding
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.scores import accumulation_dtype, softmax_weights
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.patterns import BlockDiagonal
from brl_jax.attention.recurrent.chunks import (
    Sight,
    check_chunked_call,
    check_runs,
    check_state,
    group_rows,
    heads_first,
    keep,
    piece_places,
    scan_chunks,
    token_runs,
    ungroup_rows,
)

# Maps (H, H, S) and (S, H, H) between a chunk's key-value product and its S numbers.
Compression = tuple[Float[Array, "H H S"], Float[Array, "S H H"]]


class BsbrState(NamedTuple):
    """What `bsbr_attention` knows of the tokens so far: a summary of each complete chunk, and the current chunk.

    Attributes:
      summary: key-value products of the complete chunks, or the S numbers that are kept of each.
      retrieval_key: of those chunks.
      retrieved: what the queries of the current chunk read from the chunks before it.
      key, value: of the current chunk's tokens, in their places.
      length: how many tokens each row has had.
    """

    summary: Float[Array, "B M K S"]
    retrieval_key: Float[Array, "B M K R"]
    retrieved: Float[Array, "B N H H"]
    key: Float[Array, "B C K H"]
    value: Float[Array, "B C K H"]
    length: Int[Array, "B"]


def init_bsbr_state(
    batch: int,
    length: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    retrieval_dim: int | None = None,
    compressed: int | None = None,
    chunk_size: int = 64,
    dtype: Any = jnp.float32,
) -> BsbrState:
    """The state of `bsbr_attention` before the first of up to `length` tokens.

    Args:
      retrieval_dim: R; head_dim by default.
      compressed: S, with `compression`; None without.
      dtype: of queries, keys and values.
    """
    chunks = -(-length // chunk_size)
    wide = accumulation_dtype(dtype)
    numbers = head_dim**2 if compressed is None else compressed
    retrieval_dim = head_dim if retrieval_dim is None else retrieval_dim
    return BsbrState(
        jnp.zeros((batch, chunks, num_kv_heads, numbers), wide),
        jnp.zeros((batch, chunks, num_kv_heads, retrieval_dim), dtype),
        jnp.zeros((batch, num_heads, head_dim, head_dim), wide),
        jnp.zeros((batch, chunk_size, num_kv_heads, head_dim), dtype),
        jnp.zeros((batch, chunk_size, num_kv_heads, head_dim), dtype),
        jnp.zeros((batch,), jnp.int32),
    )


def bsbr_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    retrieval_query: Float[Array, "B T N R"],
    retrieval_key: Float[Array, "B T K R"],
    *,
    compression: Compression | None = None,
    strength: Float[Array, "N"] | float = 1.0,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    state: BsbrState | None = None,
    return_state: bool = False,
    chunk_size: int = 64,
    implementation: str | None = None,
) -> Any:
    """Chunks of C tokens with softmax attention inside and retrieval between them; O(T C + (T / C)^2) time.

    out_i = softmax(scale q_i K_c^T) V_c + strength scale q_i sum_c' p_cc' F_c', c being the chunk of i (its keys up to
    i where causal), F_c' = K_c'^T V_c' and p_c = softmax(r_c H^T / sqrt(R)) over the chunks c' < c where causal, over
    all c' != c where not. r_c is the retrieval query of the chunk's first token, h_c' the retrieval key of its last.
    The first chunk retrieves 0. This is 004, "Technical Implementation Insights", with the masks that its text asks
    for: those of its public code let a token see later ones.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, T, K, H), of the same dtype; K divides N.
      retrieval_query, retrieval_key: (B, T, N, R) and (B, T, K, R), of the same dtype. Only those of the chunks' first
        and last tokens are read.
      compression: arrays (H, H, S) and (S, H, H) by which F goes to S numbers, which are what is kept of a chunk, and
        back after retrieval; None keeps F.
      strength: of what is retrieved, for each head (N,) or for all; F is a sum over C tokens, so 1 / C makes a mean.
      scale: 1 / sqrt(H) by default.
      is_causal, key_value_seq_lengths, implementation: as for `linear_attention`.
      state: from `init_bsbr_state` or from the tokens before these (causal only).
      return_state: return (out, state), with the state after these tokens; needs a state, whose room bounds the
        sequence.
      chunk_size: C, counted from the first token of the sequence. It changes the result.

    Returns:
      (B, T, N, H) in query's dtype, computed in float32; with return_state, that and a `BsbrState`.

    Raises:
      ValueError: arrays, lengths, a compression, a state or sizes that don't fit, naming the argument.
    """
    check_chunked_call(
        query, key, value, is_causal=is_causal, state=state, return_state=return_state, chunk_size=chunk_size,
        implementation=implementation,
    )  # fmt: skip
    require(
        query.shape[1] == key.shape[1], f"key must have query's length {query.shape[1]}, got {key.shape[1]}"
    )
    _check_retrieval(query, key, value, retrieval_query, retrieval_key, compression)
    heads, head_dim = query.shape[2:]
    scale = check_scale(scale, head_dim)
    strength = jnp.asarray(strength, accumulation_dtype(query.dtype))
    require(
        strength.shape in ((), (heads,)), f"strength must have shape ({heads},) or (), got {strength.shape}"
    )
    lengths, _ = check_runs(query, key, key_value_seq_lengths, None)
    inputs = {
        "query": query,
        "key": key,
        "value": value,
        "retrieval_query": retrieval_query,
        "retrieval_key": retrieval_key,
    }
    inputs = {name: zero_padding(x, lengths) for name, x in inputs.items()}
    retrieve = _Retrieval(compression, strength * scale)
    if state is None and not return_state:
        near = local_attention(
            inputs["query"], inputs["key"], inputs["value"], pattern=BlockDiagonal(chunk_size),
            is_causal=is_causal, scale=scale, key_value_seq_lengths=lengths, implementation=implementation,
        )  # fmt: skip
        return near + _far(inputs, lengths, retrieve, is_causal, chunk_size).astype(query.dtype)
    require(state is not None, "state must be given where return_state is: its room bounds the sequence")
    _check_bsbr_state(state, inputs, compression, chunk_size)
    runs = token_runs(query.shape[0], query.shape[1], lengths, None)

    def step(state: BsbrState, piece: Any, sight: Sight) -> tuple[BsbrState, Array]:
        return _piece(piece, state, sight, retrieve, scale, chunk_size)

    state, out = scan_chunks(step, state, inputs, runs, chunk_size=chunk_size)
    return (out, state) if return_state else out


class _Retrieval(NamedTuple):
    """From key-value products to what queries read between chunks."""

    compression: Compression | None
    factor: Array

    def summarize(self, product: Float[Array, "*B K H H"]) -> Float[Array, "*B K S"]:
        if self.compression is None:
            return product.reshape(*product.shape[:-2], -1)
        return jnp.einsum("...khv,hvs->...ks", product, self.compression[0].astype(product.dtype))

    def mix(
        self,
        query: Float[Array, "B I N R"],
        key: Float[Array, "B M K R"],
        summary: Float[Array, "B M K S"],
        seen: Bool[Array, "#B I M"],
        head_dim: int,
    ) -> Float[Array, "B I N H H"]:
        """The matrix that each head of chunk i reads, for retrieval queries I."""
        batch, count, heads, size = query.shape
        kv_heads = key.shape[2]
        dtype = accumulation_dtype(query.dtype)
        grouped = query.reshape(batch, count, kv_heads, -1, size).astype(dtype)
        logits = jnp.einsum("bikgr,bmkr->bkgim", grouped, key.astype(dtype)) / math.sqrt(size)
        weights = softmax_weights(logits, seen[:, None, None])
        mixed = jnp.einsum("bkgim,bmks->bikgs", weights, summary).reshape(batch, count, heads, -1)
        if self.compression is None:
            return mixed.reshape(batch, count, heads, head_dim, head_dim)
        return jnp.einsum("bins,shv->binhv", mixed, self.compression[1].astype(mixed.dtype))

    def read(
        self, query: Float[Array, "B *C N H"], matrix: Float[Array, "B *#C N H H"]
    ) -> Float[Array, "B *C N H"]:
        """factor q M."""
        read = jnp.einsum("...nh,...nhv->...nv", query.astype(matrix.dtype), matrix)
        factor = jnp.broadcast_to(self.factor, query.shape[-2:-1])
        return read * factor.reshape((1,) * (read.ndim - 2) + (-1, 1))


def _far(
    inputs: Any, lengths: Array | None, retrieve: _Retrieval, is_causal: bool, chunk_size: int
) -> Float[Array, "B T N H"]:
    """What a whole sequence reads between chunks."""
    batch, length = inputs["query"].shape[:2]
    chunks = -(-length // chunk_size)
    dtype = accumulation_dtype(inputs["query"].dtype)

    def cut(x: Array) -> Array:
        x = jnp.pad(x, [(0, 0), (0, chunks * chunk_size - length), (0, 0), (0, 0)])
        return x.reshape(batch, chunks, chunk_size, *x.shape[2:])

    key, value = cut(inputs["key"]).astype(dtype), cut(inputs["value"]).astype(dtype)
    summary = retrieve.summarize(jnp.einsum("bmckh,bmckv->bmkhv", key, value))
    number = jnp.arange(chunks, dtype=jnp.int32)
    ends = jnp.full((1,), length) if lengths is None else lengths
    # A chunk that is not full ends with its last token; one without tokens is seen by none.
    last = jnp.minimum((number[None] + 1) * chunk_size, ends[:, None]) - 1
    exists = number[None] * chunk_size <= last
    keys = jnp.take_along_axis(inputs["retrieval_key"], jnp.maximum(last, 0)[..., None, None], axis=1)
    earlier, other = number[None] < number[:, None], number[None] != number[:, None]
    seen = (earlier if is_causal else other)[None]
    queries = inputs["retrieval_query"][:, ::chunk_size]
    matrix = retrieve.mix(queries, keys, summary, seen & exists[:, None], key.shape[-1])
    far = retrieve.read(cut(inputs["query"]), matrix[:, :, None])
    return far.reshape(batch, chunks * chunk_size, *far.shape[3:])[:, :length]


def _piece(
    piece: Any, state: BsbrState, sight: Sight, retrieve: _Retrieval, scale: float, chunk_size: int
) -> tuple[BsbrState, Array]:
    """At most chunk_size tokens from anywhere in a chunk on: they lie in that chunk and perhaps the next one."""
    batch, length, kv_heads, head_dim = piece["key"].shape
    filled, chunk = state.length % chunk_size, state.length // chunk_size
    places = piece_places(filled, length, sight.enters, chunk_size)
    key, value = (heads_first(jnp.concatenate([getattr(state, n), piece[n]], 1)) for n in ("key", "value"))
    rows = group_rows(piece["query"], kv_heads)
    logits = scale * jnp.einsum("bkrh,bksh->bkrs", rows, key).reshape(
        batch, kv_heads, -1, length, key.shape[2]
    )
    weights = softmax_weights(logits, places.inside(chunk_size)[:, None, None])
    near = jnp.einsum("bkrs,bksv->bkrv", weights.reshape(*rows.shape[:3], -1), value)

    done = keep(places.completed(chunk_size)[:, None], key)
    summary = retrieve.summarize(jnp.einsum("bksh,bksv->bkhv", done, value))
    row, room = jnp.arange(batch), state.summary.shape[1]
    slot = jnp.where(places.total >= chunk_size, chunk, room)

    def token(x: Array, place: Array) -> Array:
        index = jnp.clip(place - filled, 0, length - 1)
        return jnp.take_along_axis(x, index[:, None, None, None], axis=1)

    new_key = token(piece["retrieval_key"], jnp.full_like(filled, chunk_size - 1))[:, 0]
    summaries = state.summary.at[row, slot].set(summary, mode="drop")
    retrieval_key = state.retrieval_key.at[row, slot].set(new_key, mode="drop")

    def renew(begins: Array, place: Array, number: Array, keys: Array, chunks: Array, old: Array) -> Array:
        """What is retrieved with the token at `place` by chunk `number`, in the rows where that `begins`."""

        def new() -> Array:
            seen = jnp.arange(room, dtype=jnp.int32)[None, None] < number[:, None, None]
            query = token(piece["retrieval_query"], place)
            matrix = retrieve.mix(query, keys, chunks, seen, head_dim)[:, 0]
            return jnp.where(begins[:, None, None, None], matrix, old)

        # All chunks are read at the beginning of one only, not for each of its tokens.
        return lax.cond(jnp.any(begins), new, lambda: old)

    # The chunks before this one are in the old arrays: read from these, they need not be copied to be written.
    here = renew(filled == 0, filled, chunk, state.retrieval_key, state.summary, state.retrieved)
    far = retrieve.read(piece["query"], here[:, None])
    retrieved = here
    if length > 1:
        follows = places.total > chunk_size
        second = jnp.full_like(filled, chunk_size)
        retrieved = renew(follows, second, chunk + 1, retrieval_key, summaries, here)
        beyond = retrieve.read(piece["query"], retrieved[:, None])
        far = jnp.where((places.query >= chunk_size)[..., None, None], beyond, far)

    out = ungroup_rows(near, length) + far
    current_key, current_value = (places.current(getattr(state, n), piece[n]) for n in ("key", "value"))
    state = BsbrState(
        summaries, retrieval_key, retrieved, current_key, current_value, state.length + places.new
    )
    return state, out.astype(piece["query"].dtype)


def _check_retrieval(
    query: Array, key: Array, value: Array, retrieval_query: Array, retrieval_key: Array, compression: Any
) -> None:
    require(
        value.shape[3] == key.shape[3], f"value must have key's head_dim {key.shape[3]}, got {value.shape[3]}"
    )
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
    sizes = (key.shape[3], key.shape[3])
    require(
        down.ndim == 3 and down.shape[:2] == sizes and up.shape == (down.shape[2], *sizes),
        f"compression must be arrays of shapes {(*sizes, 'S')} and {('S', *sizes)}, got {down.shape} and {up.shape}",
    )


def _check_bsbr_state(state: Any, inputs: Any, compression: Compression | None, chunk_size: int) -> None:
    require(isinstance(state, BsbrState), f"state must be a BsbrState, got {type(state).__name__}")
    query, key = inputs["query"], inputs["key"]
    length = max(state.summary.shape[1] * chunk_size, query.shape[1])
    fresh = init_bsbr_state(
        query.shape[0], length, query.shape[2], *key.shape[2:], retrieval_dim=inputs["retrieval_key"].shape[3],
        compressed=None if compression is None else compression[0].shape[2],
        chunk_size=chunk_size, dtype=query.dtype,
    )  # fmt: skip
    check_state(state, fresh, "init_bsbr_state")
