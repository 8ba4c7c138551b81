"""Synthesizer attention: weights depend on positions, or only on the query's token, not on pairs of tokens."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.checks import (
    check_dtype,
    check_floating,
    check_lengths,
    check_offset,
    check_qkv,
    require,
    zero_padding,
)
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.core.query_blocks import QUERY_BLOCK, by_query_blocks
from brl_jax.attention.core.softmax import MASKED


@attention_function
def synthesizer_attention(
    value: Float[Array, "B S K V"],
    rows: Float[Array, "B T N R"] | Float[Array, "T N R"],
    columns: Float[Array, "L N R"],
    column_bias: Float[Array, "L N"] | None = None,
    *,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    query_offset: int | Int[Array, ""] = 0,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """out_i = sum_j softmax_j(rows_i . columns_j + column_bias_j) v_j, with one column for each position.

    (B, S, K, V), (B, T, N, R), (L, N, R) -> (B, T, N, V)::

        out = synthesizer_attention(value, rows, columns, is_causal=True)

    Synthesizer (Tay et al. 2020, arXiv:2005.00743). If rows also belong to positions, this is the factorised random
    form, softmax(R_1 R_2^T) V with k = R (section 3.1). With rows relu(W_1 x_i + b_1), columns W_2 and column_bias b_2,
    it is the dense form, softmax(W_2 relu(W_1 x_i + b_1) + b_2) V. Takes O(T S (R + V)) time and O(T + S) memory: only
    256 queries at a time have weights, in the backward pass too.

    Args:
      value: (B, S, K, V), float32, bfloat16 or float16; K divides N.
      rows: (B, T, N, R), or (T, N, R) for all sequences, in value's dtype.
      columns: (L, N, R) in value's dtype, with L at least S; the first S are used.
      column_bias: (L, N) in value's dtype, added to the scores.
      is_causal: query i sees only values up to index i + query_offset.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; later rows and values are padding. Padded rows give 0.
      query_offset: an int or a traced scalar.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in value's dtype, computed in float32; a query that sees no value gives 0.

    Raises:
      ValueError: arguments do not fit together.
    """
    _check(value, rows, columns, column_bias)
    check_implementation(implementation, None, "xla")
    check_offset("query_offset", query_offset)
    (batch, num_values, kv_heads), heads = value.shape[:3], columns.shape[1]
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, batch)
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    shared = rows.ndim == 3
    # Compute weights that all sequences share only once.
    rows = rows[None] if shared else zero_padding(rows, query_lengths)
    values = zero_padding(value, lengths).astype(jnp.float32)
    columns = columns[:num_values].astype(jnp.float32)
    bias = None if column_bias is None else column_bias[:num_values].astype(jnp.float32).T[None, :, None]
    keys = jnp.arange(num_values, dtype=jnp.int32)

    def attend(rows: Array, _: Any, offset: Any) -> Float[Array, "B T N V"]:
        length = rows.shape[1]
        scores = jnp.einsum("btnr,snr->bnts", rows.astype(jnp.float32), columns)
        scores = scores if bias is None else scores + bias
        visible: Bool[Array, "#B #N #T S"] = jnp.ones((1, 1, 1, num_values), bool)
        if is_causal:
            positions = jnp.arange(length, dtype=jnp.int32) + offset
            visible = visible & (keys[None] <= positions[:, None])[None, None]
        if lengths is not None:
            visible = visible & (keys[None] < lengths[:, None])[:, None, None]
        # If a query sees nothing, the softmax is uniform, and the second mask sets it to 0.
        weights = jnp.where(visible, jax.nn.softmax(jnp.where(visible, scores, MASKED), axis=-1), 0)
        weights = weights.reshape(weights.shape[0], kv_heads, heads // kv_heads, length, num_values)
        if weights.shape[0] == 1 and length > 1:
            out = jnp.einsum("kgts,bskv->btkgv", weights[0], values)
        else:
            # Keep heads before tokens, as in the decoding cache, and rows on one axis; otherwise values are copied.
            weights = jnp.broadcast_to(weights, (batch, *weights.shape[1:]))
            grouped = weights.reshape(batch, kv_heads, -1, num_values)
            out = jnp.einsum("bkrs,bksv->bkrv", grouped, jnp.swapaxes(values, 1, 2))
            out = jnp.moveaxis(out.reshape(*weights.shape[:4], -1), 3, 1)
        out = out.reshape(batch, length, heads, value.shape[3])
        # `by_query_blocks` joins blocks along the second axis, so shared rows need a batch axis, too.
        return jnp.swapaxes(out, 0, 1)[None] if shared else out

    out = by_query_blocks(attend, QUERY_BLOCK, rows, None, jnp.asarray(query_offset, jnp.int32))
    out = jnp.swapaxes(out[0], 0, 1) if shared else out
    return zero_padding(out, query_lengths).astype(value.dtype)


def _check(value: Any, rows: Any, columns: Any, column_bias: Any) -> None:
    named = {"value": value, "rows": rows, "columns": columns, "column_bias": column_bias}
    given = {name: array for name, array in named.items() if array is not None}
    for name, array in given.items():
        require(0 not in array.shape, f"{name} must not be empty, got shape {array.shape}")
    check_qkv(value, value, value, ("value",) * 3)
    require(
        rows.ndim == 3 or (rows.ndim == 4 and rows.shape[0] == value.shape[0]),
        f"rows must have shape (length, heads, rank) or ({value.shape[0]}, length, heads, rank), got {rows.shape}",
    )
    heads, rank = rows.shape[-2:]
    require(
        columns.ndim == 3 and columns.shape[1:] == (heads, rank),
        f"columns must have shape (length, {heads}, {rank}) as rows do, got {columns.shape}",
    )
    require(
        columns.shape[0] >= value.shape[1],
        f"columns must have an entry for each of {value.shape[1]} values, got {columns.shape[0]}",
    )
    require(
        heads % value.shape[2] == 0,
        f"the heads of rows must be a multiple of the heads of value, got {heads} and {value.shape[2]}",
    )
    require(
        column_bias is None or column_bias.shape == columns.shape[:2],
        f"column_bias must have shape {columns.shape[:2]}, got {getattr(column_bias, 'shape', None)}",
    )
    check_dtype("value", value)
    check_floating(**given)
