"""The Long-Short Transformer: a window and projected tokens in one softmax (Zhu et al. 2021, arXiv:2107.02192)."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import (
    check_dtypes,
    check_lengths,
    check_positions_shape,
    check_scale,
    check_sizes,
    zero_padding,
)
from brl_jax.attention.core.boundary import attention_function
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.core.query_blocks import by_query_blocks
from brl_jax.attention.core.rotary import rotate
from brl_jax.attention.core.softmax import MASKED, block_sums, normalise
from brl_jax.attention.local import xla
from brl_jax.attention.local.call import CallArrays, PatternCall
from brl_jax.attention.local.patterns import Pattern, SlidingWindow, SurroundedBlocks

# The number of queries at a time: their scores for the projected tokens are the largest array in memory.
_QUERY_BLOCK = 512


class Norms(NamedTuple):
    """Scales of the two norms, each (K, H) for keys and values alike; None for 1.

    Attributes:
      local: of the tokens in the window.
      projected: of the projected tokens.
    """

    local: Float[Array, "K H"] | None = None
    projected: Float[Array, "K H"] | None = None


PLAIN_NORMS = Norms()


class Tokens(NamedTuple):
    """Keys and values, of the window's tokens or projected."""

    key: Float[Array, "B S K H"]
    value: Float[Array, "B S K H"]


@attention_function
def long_short_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K H"],
    projection: Float[Array, "B T K R"],
    *,
    window: int = 128,
    chunk_size: int = 16,
    norms: Norms = PLAIN_NORMS,
    epsilon: float = 1e-5,
    normalize_values: bool = True,
    positions: Int[Array, "#B T"] | None = None,
    rope_theta: float = 10000.0,
    scale: float | None = None,
    is_causal: bool = False,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N H"]:
    """One softmax over the keys of a window and over R projected keys of the whole sequence.

    (B, T, N, H), (B, T, K, H) x 2, (B, T, K, R) -> (B, T, N, H)::

        out = long_short_attention(query, key, value, projection, window=128, is_causal=True)

      P = softmax over the tokens of `projection` (x W_p);  K' = P^T K, V' = P^T V
      out_i = softmax(scale q_i [LN(K'), LN(K_window)]^T) [LN(V'); LN(V_window)]

    Long-Short Transformer, arXiv:2107.02192, eqs. 4 to 7; keys and values of the window have one LayerNorm over all
    heads together, and the projected ones another. `reference.long_short_attention` is the plain form.

    Bidirectional: the window of a token is its block of `window` tokens and window // 2 tokens on both sides of it.
    O(T (window + R)) time and memory. The authors' code for the Long Range Arena projects the normalised keys and
    values; the paper and their code for language models project them as they are, and so does this function.

    Causal: the window is the token and the window - 1 before it. Each chunk of `chunk_size` tokens is projected by a
    softmax of its own, and a token sees the projections of the chunks before its own: O(T window + T^2 R / chunk_size)
    time, and memory linear in T but for the scores of 512 queries.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, T, K, H) of the same tokens and dtype; K divides N.
      projection: the logits of P, R for each token and key head.
      window, chunk_size: as above; counted from the first token.
      norms: the scales of the LayerNorms.
      epsilon: what these add to the variance.
      normalize_values: False leaves the values as they are, so that outputs are linear in them, for inspection.
      positions: (B, T) or (1, T) ints, with rotary positions; None without. They rotate the queries and the normalised
        keys of the window. A projected key has no position, and meets queries as they are.
      rope_theta: the base of their frequencies.
      scale: the scale of the scores; 1 / sqrt(H) by default.
      is_causal: as above.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding, which may contain anything and
        enters no projection. Padded rows give 0.
      implementation: None or "xla".

    Returns:
      (B, T, N, H) in the dtype of the query. Norms and softmax are computed in float32.

    Raises:
      ValueError: shapes, dtypes, sizes or an implementation that do not fit, naming the argument.
    """
    check_long_short(query, key, value, projection, norms)
    check_implementation(implementation, None, "xla")
    check_sizes(window=window, chunk_size=chunk_size)
    batch, length, _, head_dim = key.shape
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    query, key, value, projection = (zero_padding(x, lengths) for x in (query, key, value, projection))
    scale = check_scale(scale, head_dim)
    if positions is not None:
        check_positions_shape(positions, query, key)
    tokens = Tokens(key, value)
    if is_causal:
        whole = length // chunk_size * chunk_size
        projected = project_chunks(tokens, projection, whole, chunk_size, norms, epsilon, normalize_values)
    else:
        inside = None if lengths is None else jnp.arange(length, dtype=jnp.int32)[None] < lengths[:, None]
        projected = _project(tokens, projection, inside)
        projected = _normalise_tokens(projected, norms.projected, epsilon, normalize_values)
    far = attend_to_projected(
        query, projected, scale, chunk=(projection.shape[3], chunk_size) if is_causal else None
    )
    near = local_tokens(tokens, norms, epsilon, positions, rope_theta, normalize_values)
    query = query if positions is None else rotate(query, positions, rope_theta)
    call = PatternCall(
        pattern=window_pattern(window, is_causal),
        is_causal=is_causal,
        scale=scale,
        num_queries=length,
        num_keys=length,
    )
    out = xla.attend_with(call, CallArrays(query, *near, key_lengths=lengths), *far)
    return zero_padding(out, lengths).astype(query.dtype)


def window_pattern(window: int, is_causal: bool) -> Pattern:
    """The keys of the window."""
    return SlidingWindow(window - 1, 0) if is_causal else SurroundedBlocks(window, window // 2)


def local_tokens(
    tokens: Tokens,
    norms: Norms,
    epsilon: float,
    positions: Any,
    rope_theta: float,
    normalize_values: bool = True,
) -> Tokens:
    """The window's tokens, normalised, the keys rotated to their positions."""
    near = _normalise_tokens(tokens, norms.local, epsilon, normalize_values)
    return near if positions is None else near._replace(key=rotate(near.key, positions, rope_theta))


def check_long_short(query: Array, key: Array, value: Array, projection: Array, norms: Norms) -> None:
    """Raises ValueError, naming the argument, unless the tokens' arrays and the norms fit each other."""
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


def project_chunks(
    tokens: Tokens,
    projection: Float[Array, "B S K R"],
    whole: int,
    chunk_size: int,
    norms: Norms,
    epsilon: float,
    normalize_values: bool = True,
) -> Tokens:
    """The normalised projections of the chunks of the first `whole` tokens, R of each in turn."""
    batch, rank = projection.shape[0], projection.shape[3]
    cut = lambda x: x[:, :whole].reshape(-1, chunk_size, *x.shape[2:])  # noqa: E731
    projected = _project(Tokens(*map(cut, tokens)), cut(projection), None)
    join = lambda x: x.reshape(batch, whole // chunk_size * rank, *x.shape[2:])  # noqa: E731
    return _normalise_tokens(Tokens(*map(join, projected)), norms.projected, epsilon, normalize_values)


def attend_to_projected(
    query: Float[Array, "B T N H"],
    projected: Tokens,
    scale: float,
    *,
    chunk: tuple[int, int] | None = None,
    query_offset: Any = 0,
) -> tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """The output and the log-sum-exp of the softmax over projected tokens, in float32.

    Args:
      chunk: the number of projected tokens of a chunk and its size, where a query sees only those of the chunks before
        its own; None where all queries see all.
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
        none = jnp.zeros(query.shape, jnp.float32)
        return none, jnp.full(query.shape[:3], -MASKED, jnp.float32)
    return by_query_blocks(attend, _QUERY_BLOCK, query, None, query_offset)


def _project(tokens: Tokens, projection: Float[Array, "B S K R"], inside: Array | None) -> Tokens:
    """P^T K and P^T V with P the softmax of the logits over the tokens inside."""
    where = None if inside is None else inside[:, :, None, None]
    weights = jax.nn.softmax(projection.astype(jnp.float32), axis=1, where=where)

    def apply(x: Float[Array, "B S K H"]) -> Float[Array, "B R K H"]:
        # Not einsum: its order of axes makes XLA's CPU backend refuse a product with bfloat16 that follows.
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
