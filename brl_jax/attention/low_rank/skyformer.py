"""Skyformer: kernelized attention through sampled queries and keys (Chen et al. 2021, arXiv:2111.00035)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int, PRNGKeyArray

from brl_jax.attention.core.checks import given_or_drawn, zero_padding
from brl_jax.attention.core.decorators import attention_function
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.same_tokens import prepare_same_tokens
from brl_jax.attention.dense.kernelized import gaussian_kernel, kernelized_attention
from brl_jax.attention.low_rank.pseudo_inverse import iterative_pseudo_inverse
from brl_jax.fields import Count, NonNegative, declared


@declared
def skyformer_samples(rng: PRNGKeyArray, num_samples: Count) -> Float[Array, " R"]:
    """Random places for `skyformer_attention`, (num_samples,) uniform in [0, 1).

    Raises:
      ValueError: num_samples is below 1.
    """
    return jax.random.uniform(rng, (num_samples,), jnp.float32)


@attention_function
def skyformer_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B T K H"],
    value: Float[Array, "B T K V"],
    *,
    rng: PRNGKeyArray | None = None,
    samples: Float[Array, " R"] | None = None,
    num_samples: Count | None = None,
    iterations: Count = 6,
    ridge: NonNegative = 0.1,
    scale: float | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Approximates `kernelized_attention` through R rows X_S of [Q; K], in O(T R) time and memory.

    (B, T, N, H), (B, T, K, H), (B, T, K, V) -> (B, T, N, V)::

        out = skyformer_attention(query, key, value, rng=jax.random.key(0), num_samples=64)

      out = C(Q, X_S) (C(X_S, X_S) + ridge I)^-1 C(X_S, K) V

    C is the Gaussian kernel (Skyformer, arXiv:2111.00035, section 4). A = C(X_S, X_S) is scaled to D^(-1/2) (A +
    ridge I) D^(-1/2), where D are its row sums, and `iterative_pseudo_inverse` inverts it. It has no causal form:
    queries read samples from the whole sequence.

    As in the authors' code, half of the samples are queries and half are keys, drawn with replacement, and the
    ridge is 0.1. That code draws samples separately for each row of a batch. Here all rows and heads are sampled at
    the same fractions of their length, so a row does not depend on its place in the batch.

    Args:
      query, key, value: (B, T, N, H), (B, T, K, H) and (B, T, K, V) of the same tokens, float32, bfloat16 or
        float16; K divides N.
      rng: random key from which the places are drawn. Give rng or samples.
      samples: the places from `skyformer_samples`, (R,) floats in [0, 1). Place p of a row of L tokens is token
        floor(p L). The first R // 2 choose queries, the others keys.
      num_samples: R, the number of places to draw; 128 by default.
      iterations: steps of the inverse.
      ridge: added to the diagonal, at least 0.
      scale: multiplies the squared distances, at least 0; 1 / sqrt(H) by default.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding. Padding may contain anything, is
        never sampled, and gives 0.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the query's dtype, computed in float32.

    Raises:
      ValueError: an argument does not fit, or rng and samples are both given or both missing.
    """
    query, key, value, lengths, scale, dtype = prepare_same_tokens(
        query, key, value, scale=scale, key_value_seq_lengths=key_value_seq_lengths, implementation=implementation
    )  # fmt: skip
    draw = functools.partial(skyformer_samples, num_samples=128 if num_samples is None else num_samples)
    samples = given_or_drawn("samples", samples, (), rng, draw, num_samples=num_samples)
    length, group = query.shape[1], query.shape[2] // key.shape[2]
    counts = jnp.full((query.shape[0],), length, jnp.int32) if lengths is None else lengths
    places = jnp.floor(samples[None] * counts[:, None].astype(jnp.float32)).astype(jnp.int32)
    # A place close to 1 may round up to the length.
    places = jnp.clip(places, 0, jnp.maximum(counts[:, None] - 1, 0))[..., None, None]
    half = samples.shape[0] // 2
    queries = jnp.take_along_axis(query, places[:, :half], axis=1)
    keys = jnp.take_along_axis(key, places[:, half:], axis=1)
    chosen = jnp.concatenate([queries, jnp.repeat(keys, group, axis=2)], axis=1)

    read = kernelized_attention(chosen, key, value, scale=scale)
    between = gaussian_kernel(chosen, chosen, scale)
    between += ridge * jnp.eye(samples.shape[0], dtype=between.dtype)[None, None]
    root = lax.rsqrt(between.sum(-1))
    inverse = iterative_pseudo_inverse(between * root[..., None] * root[..., None, :], iterations)
    inverse = inverse * root[..., None] * root[..., None, :]
    read = jnp.einsum("bnrs,bsnv->brnv", inverse, read, precision=lax.Precision.HIGHEST)
    out = kernelized_attention(query, chosen, read, scale=scale)
    return zero_padding(out, lengths).astype(dtype)
