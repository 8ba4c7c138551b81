"""Long-Short Transformer: a window and projected tokens in one softmax (Zhu et al. 2021, arXiv:2107.02192)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, DTypeLike, Float, Int

from brl_jax.attention.core.checks import (
    check_dtypes,
    check_lengths,
    check_positions,
    check_qkv,
    check_scale,
    check_within,
    require,
    zero_padding,
)
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.core.query_blocks import by_query_blocks
from brl_jax.attention.core.rotary import rotate
from brl_jax.attention.core.softmax import MASKED, block_sums, merge_sums, normalise, sums_of_normalised
from brl_jax.attention.core.state import check_state_options, slide, window_segments, write_places
from brl_jax.attention.local.attend import attend
from brl_jax.attention.local.patterns import CallArrays, PatternCall, SlidingWindow, SurroundedBlocks
from brl_jax.fields import Count, NonNegative, Positive, declared
from pallas_kernels.absent import existing

# Queries at a time: their scores against the projected tokens are the largest array in memory.
_QUERY_BLOCK = 512


class Norms(NamedTuple):
    """Scales of the two norms, each (K, H) for both keys and values; None means 1.

    Attributes:
      local: for the tokens in the window.
      projected: for the projected tokens.
    """

    local: Float[Array, "K H"] | None = None
    projected: Float[Array, "K H"] | None = None


PLAIN_NORMS = Norms()


class Tokens(NamedTuple):
    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]


class LongShortState(NamedTuple):
    """What causal `long_short_attention` keeps of the tokens so far, newest last.

    Attributes:
      window: normalised and rotated keys and values of the last window - 1 tokens.
      chunk: unchanged keys and values of the last chunk_size tokens.
      logits: (B, C, K, R), the projection logits of the same tokens.
      projected: the normalised projections of all completed chunks, with capacity for later ones.
      length: () int32, the number of tokens so far.
    """

    window: Tokens
    chunk: Tokens
    logits: Float[Array, "B C K R"]
    projected: Tokens
    length: Int[Array, ""]


@declared
def init_long_short_state(
    batch: Count,
    num_kv_heads: Count,
    head_dim: Count,
    *,
    length: Count,
    chunk_rank: Count = 1,
    window: Count = 128,
    chunk_size: Count = 16,
    dtype: DTypeLike = jnp.float32,
) -> LongShortState:
    """Returns the state of `long_short_attention` before the first of up to `length` tokens.

    Args:
      chunk_rank: R, the number of projected tokens per chunk.
      window, chunk_size: as for `long_short_attention`.

    Raises:
      ValueError: a size is below 1.
    """

    def empty(tokens: int, features: int = head_dim) -> Array:
        return jnp.zeros((batch, tokens, num_kv_heads, features), dtype)

    def both(tokens: int) -> Tokens:
        return Tokens(empty(tokens), empty(tokens))

    chunks = both(length // chunk_size * chunk_rank)
    return LongShortState(
        both(min(window, length + 1) - 1), both(chunk_size), empty(chunk_size, chunk_rank), chunks,
        jnp.zeros((), jnp.int32),
    )  # fmt: skip


@attention_function
def long_short_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    projection: Float[Array, "B T K R"],
    *,
    window: Count = 128,
    chunk_size: Count = 16,
    norms: Norms = PLAIN_NORMS,
    epsilon: NonNegative = 1e-5,
    normalize_values: bool = True,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    positions: Int[Array, "#B T"] | None = None,
    rope_theta: Positive = 10000.0,
    state: LongShortState | None = None,
    return_state: bool = False,
    count: Int[Array, ""] | int | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], LongShortState]:
    """Attends to a window and to R projected tokens of the whole sequence, in one softmax.

    (B, T, N, H), (B, T, K, H) x 2, (B, T, K, R) -> (B, T, N, H)::

        out = long_short_attention(query, key, value, projection, window=128, is_causal=True)

      P = softmax of `projection` over the tokens;  K' = P^T K, V' = P^T V
      out_i = softmax(scale q_i [LN(K'), LN(K_window)]^T) [LN(V'); LN(V_window)]

    Long-Short Transformer, arXiv:2107.02192, eqs. 4 to 7. A LayerNorm runs over all heads together; the window and the
    projected tokens have one each.

    Bidirectional: the window of a token is its block of `window` tokens and window // 2 tokens on each side of it.
    Time and memory are O(T (window + R)). Keys and values are projected before they are normalised, as in the paper
    and in the authors' code for language models; their code for the Long Range Arena normalises first.

    Causal: the window is the token and the window - 1 tokens before it. Each chunk of `chunk_size` tokens has its own
    softmax P, and a token sees the projections of the chunks before its own. Time is
    O(T window + T^2 R / chunk_size); memory is linear in T, apart from the scores of 512 queries.

    Generation continues from a state, with any number of tokens at a time::

        state = init_long_short_state(batch, num_kv_heads, head_dim, length=4096)
        out, state = long_short_attention(..., is_causal=True, state=state, return_state=True)

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, T, K, H) of the same tokens and dtype; K divides N. They have one width because they share a norm.
      projection: the logits of P, R per token and key head.
      window, chunk_size: as above; windows and chunks are counted from the first token.
      norms: scales of the LayerNorms.
      epsilon: added to the variance.
      normalize_values: False leaves the values unchanged, so that outputs are linear in them, for inspection.
      scale: scale of the scores; 1 / sqrt(H) by default.
      is_causal: as above.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding. Padding may contain anything, is not
        projected, and gives 0. Without a state only.
      positions: (B, T) or (1, T) ints for rotary positions, or None. They rotate queries and normalised keys within the
        window. Projected keys have no position and meet the unrotated queries.
      rope_theta: base of the rotary frequencies.
      state: from `init_long_short_state` or an earlier call; causal only. Tokens beyond its length are lost.
      return_state: also return the state after these tokens; needs a state.
      count: with a state, how many tokens are valid, from the first (None: all). Other outputs are undefined.
      implementation: None or "xla".

    Returns:
      (B, T, N, H) in the query's dtype, with float32 norms and softmax; with return_state, also the new state.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    check_state_options(
        "init_long_short_state", state=state, return_state=return_state, count=count, is_causal=is_causal,
        key_value_seq_lengths=key_value_seq_lengths,
    )  # fmt: skip
    _check_arrays(query, key, value, projection, norms)
    check_within("count", count, query.shape[1])
    check_implementation(implementation, None, "xla")
    batch, length, _, head_dim = key.shape
    scale = check_scale(scale, head_dim)
    if positions is not None:
        check_positions(positions, query, key)

    def local_tokens(key: Array, value: Array) -> Tokens:
        near = _normalise_tokens(Tokens(key, value), norms.local, epsilon, normalize_values)
        return near if positions is None else near._replace(key=rotate(near.key, positions, rope_theta))

    def project_chunks(key: Array, value: Array, logits: Array) -> Tokens:
        """The normalised projections of whole chunks, (B, chunks * R, K, H)."""
        cut = lambda x: x.reshape(-1, chunk_size, *x.shape[2:])  # noqa: E731
        projected = _project(Tokens(cut(key), cut(value)), cut(logits), None)
        join = lambda x: x.reshape(batch, key.shape[1] // chunk_size * logits.shape[3], *x.shape[2:])  # noqa: E731
        return _normalise_tokens(Tokens(*map(join, projected)), norms.projected, epsilon, normalize_values)

    turned = query if positions is None else rotate(query, positions, rope_theta)
    if state is None:
        lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
        query, key, value, projection = (zero_padding(x, lengths) for x in (query, key, value, projection))
        chunk = (projection.shape[3], chunk_size) if is_causal else None
        if is_causal:
            whole = length // chunk_size * chunk_size
            projected = project_chunks(*(x[:, :whole] for x in (key, value, projection)))
        else:
            inside = None if lengths is None else existing(lengths, length)
            projected = _project(Tokens(key, value), projection, inside)
            projected = _normalise_tokens(projected, norms.projected, epsilon, normalize_values)
        far = _attend_to_projected(query, projected, scale, chunk=chunk)
        pattern = SlidingWindow(window - 1, 0) if is_causal else SurroundedBlocks(window, window // 2)
        call = PatternCall(
            pattern=pattern, is_causal=is_causal, scale=scale, num_queries=length, num_keys=length,
            return_residual=True,
        )  # fmt: skip
        arrays = CallArrays(zero_padding(turned, lengths), *local_tokens(key, value), key_lengths=lengths)
        return zero_padding(_in_one_softmax(call, arrays, far), lengths).astype(query.dtype)

    _check_state(state, key, projection, window, chunk_size)
    start, count, rank = state.length, length if count is None else count, projection.shape[3]

    move = functools.partial(slide, count=count)
    raw, recent = zip(*map(move, (*state.chunk, state.logits), (key, value, projection)))
    # Project the chunks that these tokens may complete. In `raw`, position p is at p - start + chunk_size.
    number = start // chunk_size + jnp.arange((length + chunk_size - 1) // chunk_size, dtype=jnp.int32)
    offsets = jnp.arange(chunk_size, dtype=jnp.int32)[None]
    places = number[:, None] * chunk_size + offsets - start + chunk_size
    places = jnp.clip(places, 0, chunk_size + length - 1).reshape(-1)
    done = project_chunks(*(jnp.take(x, places, axis=1) for x in raw))
    # Incomplete chunks go to a slot past the end, where nothing is written.
    slots = number[:, None] * rank + jnp.arange(rank, dtype=jnp.int32)[None]
    complete = (number[:, None] + 1) * chunk_size <= start + count
    slots = jnp.where(complete, slots, state.projected.key.shape[1]).reshape(-1)
    projected = Tokens(*(write_places(x, new, slots) for x, new in zip(state.projected, done)))
    far = _attend_to_projected(query, projected, scale, chunk=(rank, chunk_size), query_offset=start)

    (near_key, last_key), (near_value, last_value) = map(move, state.window, local_tokens(key, value))
    reach = last_key.shape[1]
    call = PatternCall(
        pattern=SlidingWindow(reach, 0),
        is_causal=True,
        scale=scale,
        num_queries=length,
        num_keys=reach + length,
        query_offset=reach,
        return_residual=True,
    )
    query_ids, key_ids = window_segments(batch, length, reach, start)
    arrays = CallArrays(turned, near_key, near_value, query_segments=query_ids, key_segments=key_ids)
    out = _in_one_softmax(call, arrays, far).astype(query.dtype)
    end = jnp.asarray(start + count, jnp.int32)
    new = LongShortState(Tokens(last_key, last_value), Tokens(*recent[:2]), recent[2], projected, end)
    return (out, new) if return_state else out


def _check_arrays(query: Array, key: Array, value: Array, projection: Array, norms: Norms) -> None:
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    length, head_dim = key.shape[1], key.shape[3]
    require(
        query.shape[1] == length and value.shape[3] == head_dim,
        f"key and value must have query's length and head_dim {query.shape[1]}, {head_dim}, got {value.shape}",
    )
    require(
        projection.shape[:3] == key.shape[:3] and projection.ndim == 4,
        f"projection must have shape {(*key.shape[:3], 'R')}, got {projection.shape}",
    )
    for name, norm in norms._asdict().items():
        require(
            norm is None or norm.shape == key.shape[2:],
            f"norms.{name} must have shape {key.shape[2:]}, got {None if norm is None else norm.shape}",
        )


def _check_state(state: Any, key: Array, projection: Array, window: int, chunk_size: int) -> None:
    for name, old, new in (("chunk.key", state.chunk.key, key), ("logits", state.logits, projection)):
        expected = (new.shape[0], chunk_size, *new.shape[2:])
        require(
            old.shape == expected and old.dtype == new.dtype,
            f"state.{name} must be {new.dtype} of shape {expected}, got {old.dtype} of shape {old.shape}",
        )
    # A state for fewer tokens than the window keeps all of them.
    reach, chunks = (x.key.shape[1] for x in (state.window, state.projected))
    whole = reach < window and reach // chunk_size * projection.shape[3] == chunks
    require(reach == window - 1 or whole, f"window must be {reach + 1}, as in the state, got {window}")


def _in_one_softmax(
    call: PatternCall, window: CallArrays, far: tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]
) -> Float[Array, "B T N H"]:
    """The float32 output over the window's keys and the keys of `far`, which is an output and its log-sum-exp."""
    parts = (sums_of_normalised(*result) for result in (attend(call, "xla", window), far))
    return normalise(merge_sums(*parts))[0]


def _attend_to_projected(
    query: Float[Array, "B T N H"],
    projected: Tokens,
    scale: float,
    *,
    chunk: tuple[int, int] | None = None,
    query_offset: Any = 0,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The float32 output and log-sum-exp of the softmax over projected tokens.

    Args:
      chunk: (projected tokens per chunk, chunk size) if a query sees only the chunks before its own; None if every
        query sees every projected token.
      query_offset: the position of the first query.
    """
    key, value = projected

    def attend(query: Array, _: Any, offset: Any) -> tuple[Array, Array]:
        batch, length, heads, head_dim = query.shape
        rows = query.reshape(batch, length, key.shape[2], -1, head_dim)
        scores = jnp.einsum("btkgh,brkh->btkgr", rows, key, preferred_element_type=jnp.float32) * scale
        if chunk is not None:
            own = (offset + jnp.arange(length, dtype=jnp.int32)) // chunk[1]
            seen = jnp.arange(key.shape[1], dtype=jnp.int32)[None] // chunk[0] < own[:, None]
            scores = jnp.where(seen[None, :, None, None], scores, MASKED)

        def read(weights: Array) -> Array:
            weights = weights.astype(value.dtype)
            return jnp.einsum("btkgr,brkh->btkgh", weights, value, preferred_element_type=jnp.float32)

        out, lse = normalise(block_sums(scores, read))
        return out.reshape(batch, length, heads, -1), lse.reshape(batch, length, heads)

    if key.shape[1] == 0:
        return jnp.zeros(query.shape, jnp.float32), jnp.full(query.shape[:3], -MASKED, jnp.float32)
    return by_query_blocks(attend, _QUERY_BLOCK, query, None, query_offset)


def _project(tokens: Tokens, projection: Float[Array, "B S K R"], inside: Array | None) -> Tokens:
    """P^T K and P^T V, where P is the softmax of the logits over the tokens inside."""
    where = None if inside is None else inside[:, :, None, None]
    weights = jax.nn.softmax(projection.astype(jnp.float32), axis=1, where=where)

    def apply(x: Float[Array, "B S K H"]) -> Float[Array, "B R K H"]:
        # Not einsum, whose result has an axis order that XLA's CPU backend cannot then multiply by bfloat16.
        left, right = (jnp.swapaxes(y.astype(jnp.float32), 1, 2) for y in (weights, x))
        return jnp.swapaxes(jnp.matmul(jnp.swapaxes(left, 2, 3), right), 1, 2).astype(x.dtype)

    return Tokens(*map(apply, tokens))


def _normalise_tokens(tokens: Tokens, scale: Array | None, epsilon: float, normalize_values: bool) -> Tokens:
    value = _layer_norm(tokens.value, scale, epsilon) if normalize_values else tokens.value
    return Tokens(_layer_norm(tokens.key, scale, epsilon), value)


def _layer_norm(
    x: Float[Array, "B S K H"], scale: Float[Array, "K H"] | None, epsilon: float
) -> Float[Array, "B S K H"]:
    """LayerNorm over all heads together, with statistics in float32."""
    centred = x.astype(jnp.float32)
    centred = centred - centred.mean((2, 3), keepdims=True)
    out = centred * lax.rsqrt(jnp.square(centred).mean((2, 3), keepdims=True) + epsilon)
    return (out if scale is None else out * scale.astype(jnp.float32)[None, None]).astype(x.dtype)
