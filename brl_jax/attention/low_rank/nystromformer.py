"""Nystromformer: softmax attention through landmarks, the means of segments (Xiong et al. 2021, arXiv:2102.03902)."""

from __future__ import annotations

import functools

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import require, zero_padding
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.halo import with_halo
from brl_jax.attention.core.same_tokens import prepare_same_tokens
from brl_jax.attention.core.softmax import softmax_weights
from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.low_rank.few_keys import attend_to_few
from brl_jax.attention.low_rank.pseudo_inverse import iterative_pseudo_inverse
from brl_jax.fields import Count
from brl_jax.sharding import sequence_axis, shard_call


@attention_function
def nystromformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    num_landmarks: Count = 128,
    iterations: Count = 6,
    value_kernel: Float[Array, "N W"] | None = None,
    scale: float | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Approximates softmax attention through R landmarks, in O(T R) time and memory.

    (B, T, N, H), (B, T, K, H), (B, T, K, V) -> (B, T, N, V)::

        out = nystromformer_attention(query, key, value, num_landmarks=64)

      out = softmax(Q K~^T) pinv(softmax(Q~ K~^T)) softmax(Q~ K^T) V

    Q~ and K~ are the means of queries and keys over R segments of the sequence, and pinv is
    `iterative_pseudo_inverse`: arXiv:2102.03902, eqs. 13 and 14. It has no causal form: landmarks are means over
    the whole sequence, and every query reads all of them.

    Token t of a row of L tokens belongs to segment floor(t R / L), so segments differ by at most one token if R
    does not divide L, a case that the paper excludes. A row shorter than R has one landmark per token, which gives
    full attention as far as the iteration has converged. As in the paper, each matrix has its own starting scale
    for the inverse; the authors' code takes the largest in the batch.

    Args:
      query, key, value: (B, T, N, H), (B, T, K, H) and (B, T, K, V) of the same tokens, float32, bfloat16 or
        float16; K divides N.
      num_landmarks: R.
      iterations: steps of the pseudo-inverse.
      value_kernel: (N, W) with W odd, or None. Adds to each head the convolution of its values along the sequence
        with this kernel (the paper's skip connection, with W = 33).
      scale: scale of the scores; 1 / sqrt(H) by default.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding. Padding may contain anything,
        enters no landmark, and gives 0.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    query, key, value, lengths, scale, dtype = prepare_same_tokens(
        query, key, value, scale=scale, key_value_seq_lengths=key_value_seq_lengths, implementation=implementation
    )  # fmt: skip
    _check_kernel(value_kernel, query.shape[2])
    batch, length, heads = query.shape[:3]
    counts = jnp.full((batch,), length, jnp.int32) if lengths is None else lengths
    means = _segment_means(counts, length, min(num_landmarks, length))
    key_landmarks, query_landmarks = (jnp.einsum("btr,btnh->brnh", means, x) for x in (key, query))
    # Short rows have fewer landmarks: the first `present` ones.
    present = jnp.minimum(counts, means.shape[2])
    exists = jnp.arange(means.shape[2], dtype=jnp.int32)[None] < present[:, None]
    key_landmarks = jnp.repeat(key_landmarks, heads // key.shape[2], axis=2)
    scores = jnp.einsum("brnh,bsnh->bnrs", query_landmarks, key_landmarks) * scale
    between = softmax_weights(scores, exists[:, None, :, None] & exists[:, None, None, :])
    read = full_attention(
        query_landmarks, key, value, scale=scale, query_seq_lengths=present, key_value_seq_lengths=lengths,
        implementation="xla",
    )  # fmt: skip
    inverse = iterative_pseudo_inverse(between, iterations)
    read = jnp.einsum("bnrs,bsnv->brnv", inverse, read, precision=lax.Precision.HIGHEST)
    out = attend_to_few(
        query, key_landmarks, read, scale=scale, key_value_seq_lengths=present, implementation="xla"
    )
    if value_kernel is not None:
        out = out + _convolve(value, value_kernel)
    return zero_padding(out, lengths).astype(dtype)


def _segment_means(lengths: Int[Array, " B"], length: int, count: int) -> Float[Array, "B T R"]:
    """The matrix that averages each segment: 1 / (segment size) for its tokens, 0 for the others."""
    places = jnp.arange(length, dtype=jnp.int32)[None]
    segment = places * jnp.minimum(lengths, count)[:, None] // jnp.maximum(lengths, 1)[:, None]
    # The segments of padding come after the row's own, which no landmark reads.
    members = segment[..., None] == jnp.arange(count, dtype=jnp.int32)[None, None]
    members = members.astype(jnp.float32)
    return members / jnp.maximum(members.sum(1, keepdims=True), 1)


def _check_kernel(kernel: Array | None, heads: int) -> None:
    require(
        kernel is None or (kernel.ndim == 2 and kernel.shape[0] == heads and kernel.shape[1] % 2 == 1),
        f"value_kernel must have shape ({heads}, an odd size), got {None if kernel is None else kernel.shape}",
    )


def _convolve(value: Float[Array, "B T K V"], kernel: Float[Array, "N W"]) -> Float[Array, "B T N V"]:
    """sum_w kernel[w] value[t + w - W // 2] for each head, with zeros beyond both ends."""
    axis = sequence_axis(value.shape[1])
    tokens = None if axis is None else "length"
    # The compiler multiplies the kernel's gradient by the size of mesh axes that divide neither, so each device
    # convolves its own tokens.
    return shard_call(
        functools.partial(_convolve_shard, axis),
        (value, kernel),
        [("batch", tokens, "kv_heads", None), ("heads", None)],
        ("batch", tokens, "heads", None),
    )


def _convolve_shard(
    axis: str | None, value: Float[Array, "B T K V"], kernel: Float[Array, "N W"]
) -> Float[Array, "B T N V"]:
    """`_convolve` for rows that are sharded over a mesh axis."""
    heads, size = kernel.shape
    batch, length, kv_heads, value_dim = value.shape
    side = size // 2
    padding = (side, side) if axis is None else (0, 0)
    if axis is not None:
        value = with_halo(value, side, side, axis)
    value = jnp.repeat(value, heads // kv_heads, axis=2)
    rows = value.transpose(0, 3, 1, 2).reshape(batch * value_dim, -1, heads)
    out = lax.conv_general_dilated(
        rows,
        kernel.astype(value.dtype).T[:, None],
        window_strides=(1,),
        padding=[padding],
        dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=heads,
    )
    return out.reshape(batch, value_dim, length, heads).transpose(0, 2, 3, 1)
