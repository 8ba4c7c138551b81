"""One softmax over keys that are visited a block at a time: sums over a block, their merge, and the gradient.

A block yields three numbers for each row of scores: the largest score, the sum of the exponentials relative to it, and
the values weighted by these exponentials. Blocks merge without loss, however large the scores, because only differences
of maxima are exponentiated (the online softmax, Milakov and Gimelshein 2018, arXiv:1805.02867). The backward pass
recomputes the weights from the output and each row's log-sum-exp (FlashAttention, Dao et al. 2022, arXiv:2205.14135,
appendix B).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Bool, Float

#: The score of a key that a query does not see. It is finite, so that the difference of two is not NaN.
MASKED = -0.7 * float(np.finfo(np.float32).max)


@jax.custom_jvp
def rounded(scores: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """The scores, rounded to their dtype before anything is subtracted.

    A compiler may turn products * scale - maximum into one multiply-add, which subtracts the rounded maximum from the
    exact product. For scores near 1e9 the difference is off by 32, so its exponential overflows or, at the maximum, is
    0. No compiler looks through a maximum, so we take one.
    """
    return jnp.maximum(scores, jnp.asarray(MASKED, scores.dtype))


@rounded.defjvp
def _rounded_jvp(primals: tuple, tangents: tuple) -> tuple:
    return rounded(*primals), *tangents


def softmax_weights(
    scores: Float[Array, "*rows S"], mask: Bool[Array, "..."] | None
) -> Float[Array, "*rows S"]:
    """The softmax over all keys at once; rows in which `mask` (broadcastable) leaves no key give 0."""
    return jax.nn.softmax(rounded(scores), axis=-1, where=mask)


class SoftmaxSums(NamedTuple):
    """The state of each row's softmax after some of its keys.

    Attributes:
      maximum: the largest score; MASKED while no key has been seen.
      normaliser: the sum of exp(score - maximum); 0 while no key has been seen.
      weighted: the sum of exp(score - maximum) * value.
    """

    maximum: Float[Array, "*rows"]
    normaliser: Float[Array, "*rows"]
    weighted: Float[Array, "*rows V"]


def empty_sums(rows: tuple[int, ...], value_dim: int, dtype: Any = jnp.float32) -> SoftmaxSums:
    """The sums before any key."""
    return SoftmaxSums(
        jnp.full(rows, MASKED, dtype), jnp.zeros(rows, dtype), jnp.zeros((*rows, value_dim), dtype)
    )


def finite_maximum(maximum: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """What to subtract from scores before the exponential; 0 for rows without a visible key, so that weights are 0."""
    return jnp.where(maximum > MASKED / 2, maximum, jnp.zeros((), maximum.dtype))


def block_sums(
    scores: Float[Array, "*rows S"], read: Callable[[Float[Array, "*rows S"]], Float[Array, "*rows V"]]
) -> SoftmaxSums:
    """The sums over one block of keys.

    Args:
      scores: MASKED or -inf for keys that a query does not see.
      read: multiplies weights by the block's values.
    """
    scores = rounded(scores)
    # Results do not depend on what is subtracted, so gradients need not either. A maximum's gradient would divide by
    # the number of scores that equal it, which is 0 if a compiler recomputes the scores with other roundings.
    maximum = lax.stop_gradient(jnp.maximum(jnp.max(scores, -1), MASKED))
    weights = jnp.exp(scores - finite_maximum(maximum)[..., None])
    return SoftmaxSums(maximum, jnp.sum(weights, -1), read(weights))


def merge_sums(*parts: SoftmaxSums) -> SoftmaxSums:
    """The sums over the keys of all parts, which must be disjoint."""
    if len(parts) == 1:
        return parts[0]
    maximum = lax.stop_gradient(functools.reduce(jnp.maximum, (part.maximum for part in parts)))
    shares = [jnp.exp(part.maximum - maximum) for part in parts]
    normalisers = [share * part.normaliser for share, part in zip(shares, parts)]
    weighted = [share[..., None] * part.weighted for share, part in zip(shares, parts)]
    return SoftmaxSums(maximum, functools.reduce(jnp.add, normalisers), functools.reduce(jnp.add, weighted))


def merge_over_devices(sums: SoftmaxSums, axis_name: str) -> SoftmaxSums:
    """The sums over the keys of all devices along a mesh axis."""
    maximum = lax.pmax(lax.stop_gradient(sums.maximum), axis_name)
    share = jnp.exp(sums.maximum - maximum)
    return SoftmaxSums(
        maximum,
        lax.psum(share * sums.normaliser, axis_name),
        lax.psum(share[..., None] * sums.weighted, axis_name),
    )


def normalise(sums: SoftmaxSums) -> tuple[Float[Array, "*rows V"], Float[Array, "*rows"]]:
    """The softmax's output and the log-sum-exp of each row.

    Rows that see no key have output 0 and log-sum-exp -MASKED, so that exp(score - log_sum_exp) is 0 for any score.
    """
    sees = sums.normaliser > 0
    normaliser = jnp.where(sees, sums.normaliser, jnp.ones((), sums.normaliser.dtype))
    out = jnp.where(
        sees[..., None], sums.weighted * (1.0 / normaliser)[..., None], jnp.zeros((), sums.weighted.dtype)
    )
    return out, jnp.where(sees, sums.maximum + jnp.log(normaliser), -MASKED)


def residual(
    log_sum_exp: Float[Array, "*rows"], sinks: Float[Array, " N"] | None = None
) -> Float[Array, "*rows"]:
    """The public log-sum-exp: -inf, or the sink, for rows that see no key, where `normalise` returns -MASKED."""
    nothing = -jnp.inf if sinks is None else jnp.broadcast_to(sinks, log_sum_exp.shape)
    return jnp.where(jnp.abs(log_sum_exp) < -MASKED, log_sum_exp, nothing)


def sums_of_normalised(
    out: Float[Array, "*rows V"], log_sum_exp: Float[Array, "*rows"], dtype: Any = jnp.float32
) -> SoftmaxSums:
    """The sums of a softmax, from its output and log-sum-exp.

    Rows that see no key have a log-sum-exp of -MASKED, as from `normalise`, or -inf, as from the kernels. A float32
    log-sum-exp has a relative error of 1e-7, which limits the accuracy of a merge: for large scores, keep the sums.
    """
    sees = jnp.abs(log_sum_exp) < -MASKED
    return SoftmaxSums(jnp.where(sees, log_sum_exp, MASKED), sees.astype(dtype), out.astype(dtype))


def add_sinks(
    log_sum_exp: Float[Array, "*rows"], sinks: Float[Array, "*rows"]
) -> tuple[Float[Array, "*rows"], Float[Array, "*rows"]]:
    """Adds a sink, a logit without a value, to each row's softmax: returns the factor of the output and the new
    log-sum-exp.

    Args:
      log_sum_exp: over the keys, as `normalise` returns it. For rows that see no key it stays as it is.
      sinks: broadcasts against it.
    """
    together = jnp.logaddexp(log_sum_exp, sinks)
    return jnp.exp(log_sum_exp - together), together


def sink_sums(sinks: Float[Array, "*rows"], value_dim: int) -> SoftmaxSums:
    """The sums of rows that have seen only a sink."""
    values = jnp.zeros((*sinks.shape, value_dim), sinks.dtype)
    return SoftmaxSums(sinks, jnp.ones(sinks.shape, sinks.dtype), values)


def merge_kernels(operands: Any, results: Sequence[tuple[Array, Array]]) -> tuple[Array, Array]:
    """One softmax over the keys of all kernels and `operands.sinks`, from each kernel's output and log-sum-exp."""
    if len(results) == 1 and operands.sinks is None:
        return results[0]
    parts = [sums_of_normalised(*result) for result in results]
    if operands.sinks is not None:
        rows = jnp.broadcast_to(operands.sinks, parts[0].maximum.shape)
        parts.append(sink_sums(rows, operands.value.shape[3]))
    out, lse = normalise(merge_sums(*parts))
    return out.astype(operands.query.dtype), residual(lse)


def gradient_of_kernel(
    run: Callable[..., Any],
    operands: Any,
    results: Any,
    log_sums: Float[Array, "B N T"],
    d_results: Any,
    *,
    return_residual: bool,
) -> Any:
    """The gradient of one kernel's `merge_kernels`, without running it again.

    Args:
      run: `run(operands, known)` differentiates the kernel, whose output and log-sum-exp are `known`.
      operands: a named tuple of arrays with `sinks`, (N,) or None.
      results: after the merge: the output, (B, T, N, V), and with return_residual the log-sum-exp, (B, T, N).
      log_sums: the log-sum-exp before the merge.
      d_results: the gradients of the results.
    """

    def of_kernel(*known: Any, d_known: Any) -> Any:
        return jax.vjp(lambda operands: run(operands, known), operands)[1](d_known)[0]

    lse = log_sums.swapaxes(1, 2)
    out = results[0] if return_residual else results
    d_out, d_lse = d_results if return_residual else (d_results, jnp.zeros_like(lse))
    if operands.sinks is None:
        return of_kernel(out, lse, d_known=(d_out, d_lse))
    # The sink has the value 0 and takes 1 - share of each row's weights.
    share = jax.nn.sigmoid(lse - operands.sinks[None, None])
    wide_out, wide_d_out = out.astype(jnp.float32), d_out.astype(jnp.float32)
    delta = jnp.sum(wide_d_out * wide_out, -1)
    d_sinks = jnp.sum((1 - share) * (d_lse - delta), (0, 1))
    d_own = (share[..., None] * wide_d_out).astype(d_out.dtype), (1 - share) * delta + share * d_lse
    # The kernel's output, before the sink was merged in.
    own = (wide_out / jnp.maximum(share, jnp.finfo(jnp.float32).tiny)[..., None]).astype(out.dtype)
    return of_kernel(own, lse, d_known=d_own)._replace(sinks=d_sinks)


def softmax_gradient(
    scores: Float[Array, "*rows S"],
    log_sum_exp: Float[Array, "*rows"],
    d_weights: Float[Array, "*rows S"],
    delta: Float[Array, "*rows"],
) -> tuple[Float[Array, "*rows S"], Float[Array, "*rows S"]]:
    """The weights of one block of keys and the gradient of its scores.

    Args:
      scores: as given to `block_sums`.
      log_sum_exp: over all keys, as `normalise` returns it.
      d_weights: the product of the output's gradient and the block's values.
      delta: the product of the output's gradient and the output: the weighted mean of d_weights over all keys.
    """
    # Rounding of a large log-sum-exp must not make a weight exceed 1.
    weights = jnp.exp(jnp.minimum(scores - log_sum_exp[..., None], 0))
    return weights, weights * (d_weights - delta[..., None])
