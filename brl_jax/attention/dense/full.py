"""Full softmax attention: the kernel on a TPU, cuDNN on a GPU, or XLA."""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core import cudnn
from brl_jax.attention.core.arguments import (
    check_bias,
    check_dtypes,
    check_lengths,
    check_mask,
    check_offset,
    check_scale,
    check_segments,
    check_sinks,
    is_int,
)
from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.by_platform import Form, by_platform, gradient_of_known, without_kept
from brl_jax.attention.core.checks import check_qkv
from brl_jax.attention.core.decorators import batch_optional, divided
from brl_jax.attention.core.dispatch import Backend, Implementation, check_implementation, dispatch
from brl_jax.attention.core.on_mesh import Cut
from brl_jax.attention.dense.full_xla import FullArrays, attend_at_once, attend_in_blocks, zero_unseen
from brl_jax.fields import Positive

#: A TPU takes the kernel from this number of queries and keys on. Below it, scores take only a few MB per head.
MANY_TOKENS = 1024


def _cut(*args: Any, **arguments: Any) -> Cut | None:
    from brl_jax.attention.dense import sharded  # it imports this module

    return sharded.cut(sharded.full_attention, *args, **arguments)


@overload
def full_attention(
    query: Array, key: Array, value: Array, bias: PositionBias | Array | None = None, mask: Array | None = None, *,
    scale: float | None = None, is_causal: bool = False, query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None, segment_ids: Array | tuple[Array, Array] | None = None,
    query_offset: int | Array = 0, sinks: Array | None = None, logits_soft_cap: float | None = None,
    implementation: Implementation | None = None, return_residual: Literal[False] = False,
) -> Array: ...  # fmt: skip


@overload
def full_attention(
    query: Array, key: Array, value: Array, bias: PositionBias | Array | None = None, mask: Array | None = None, *,
    scale: float | None = None, is_causal: bool = False, query_seq_lengths: Array | None = None,
    key_value_seq_lengths: Array | None = None, segment_ids: Array | tuple[Array, Array] | None = None,
    query_offset: int | Array = 0, sinks: Array | None = None, logits_soft_cap: float | None = None,
    implementation: Implementation | None = None, return_residual: Literal[True],
) -> tuple[Array, Array]: ...  # fmt: skip


@batch_optional
@divided(_cut)
def full_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K V"],
    bias: PositionBias | Float[Array, " ..."] | None = None,
    mask: Bool[Array, " ..."] | None = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    query_offset: int | Int[Array, ""] = 0,
    sinks: Float[Array, " N"] | None = None,
    logits_soft_cap: Positive | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Float[Array, "B T N V"] | tuple[Float[Array, "B T N V"], Float[Array, "B T N"]]:
    """Softmax attention over all keys (Vaswani et al. 2017, eq. 1), in O(T S) time.

    (B, T, N, H), (B, S, K, H), (B, S, K, V) -> (B, T, N, V)::

        out = full_attention(query, key, value, is_causal=True)

    Memory is O(T + S), except through XLA on a GPU or with an array of all pairs as bias or mask.

    Arguments follow `jax.nn.dot_product_attention`. Unlike it, a query that sees no key gives 0 and zero gradients,
    padding may be NaN, the residual is differentiable, and queries may be at an offset, as when decoding with a cache.
    `reference.full_attention` is the definition.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16. The batch axis may be absent from all arrays.
      key: (B, S, K, H) in query's dtype; K divides N.
      value: (B, S, K, V) in query's dtype.
      bias: added to the scaled scores, and differentiable: an array that broadcasts to (B, N, T, S), or a
        `PositionBias`, called with all positions. A bias of -inf, or below -1.2e38, hides its key.
      mask: bools that broadcast to (B, N, T, S); a query sees only keys where it is True.
      scale: multiplies the scores; 1 / sqrt(H) by default.
      is_causal: query i sees only keys up to index i + query_offset.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; later queries and keys are padding. Padded rows give 0.
      segment_ids: int (B, T) if T = S, or a pair (B, T) and (B, S); a query sees only keys with its own id.
      query_offset: query i is at key index i + query_offset; an int or a traced scalar.
      sinks: (N,) logits that join the softmax without a value (gpt-oss, arXiv:2508.10925): p_ij = exp(score_ij) /
        (exp(sink) + sum_j exp(score_ij)). They are neither scaled nor capped.
      logits_soft_cap: a positive number c; scores become c tanh(score / c) before bias and mask (Gemma 2,
        arXiv:2408.00118).
      implementation: None picks by platform: "pallas" on a TPU if T and S are at least 1,024; "cudnn" on an NVIDIA
        GPU if it supports the call; else "xla". "pallas_interpret" interprets the TPU kernel, which takes float32 and
        bfloat16, heads of up to 256, biases by distance (`ALiBi`, `T5Bias`, `RotaryBias`, any `DistanceBias`), and
        masks of keys, (B or 1, 1, 1, S).
      return_residual: also return the log-sum-exp of each query's scores; not with "cudnn".

    Returns:
      (B, T, N, V) in query's dtype; softmax runs in float32. With return_residual, also (B, T, N) in query's dtype:
      -inf, or the sink, for a query that sees no key.

    Raises:
      ValueError: arguments do not fit together.
      NotImplementedError: the named implementation does not support the call or the platform.
    """
    check_qkv(query, key, value)
    check_dtypes(query, key, value)
    scale = check_scale(scale, query.shape[3])
    bias = check_bias(bias, query, key)
    mask = check_mask(mask, query, key)
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, query.shape[0])
    key_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0])
    segments = check_segments(segment_ids, query.shape, key.shape)
    check_offset("query_offset", query_offset)
    check_implementation(implementation, None, "xla", "cudnn", "pallas", "pallas_interpret")
    sinks = check_sinks(sinks, query.shape[2])
    cap = logits_soft_cap and float(logits_soft_cap)
    arrays = FullArrays(
        query, key, value, bias, mask, query_lengths, key_lengths, segments, query_offset, sinks
    )
    result = attend(
        arrays,
        implementation=implementation,
        scale=scale,
        is_causal=is_causal,
        cap=cap,
        return_residual=return_residual,
    )
    return (result[0], result[1].astype(query.dtype)) if return_residual else result


def attend(
    x: FullArrays,
    *,
    implementation: Implementation | None,
    scale: float,
    is_causal: bool,
    cap: float | None,
    return_residual: bool,
) -> Any:
    """`full_attention` for checked arguments, with a float32 residual; the query offset may be an int."""
    missing = _missing_for_cudnn(x, is_causal, cap, return_residual)
    static: dict[str, Any] = {
        "scale": scale,
        "is_causal": is_causal,
        "cap": cap,
        "return_residual": return_residual,
    }
    offset = int(x.query_offset) if is_int(x.query_offset) else None
    x = x._replace(query_offset=jnp.asarray(x.query_offset, jnp.int32))
    through_cudnn = functools.partial(_through_cudnn, x, scale=scale, is_causal=is_causal)
    if implementation == "cudnn":
        if missing:
            raise NotImplementedError(
                f"implementation='cudnn' supports full attention only with {'; with '.join(missing)}"
            )
        return through_cudnn(everywhere=True)
    many = min(x.query.shape[1], x.key.shape[1]) >= MANY_TOKENS
    if implementation in ("pallas", "pallas_interpret") or many:
        return _by_platform(x, offset=offset, implementation=implementation, missing=bool(missing), **static)
    if implementation == "xla" or missing or _cudnn_unsupported(x, scale=scale, is_causal=is_causal):
        return attend_at_once(x, **static)
    return through_cudnn(everywhere=False)


def _many_with_xla(known_offset: int | None, static: dict[str, Any]) -> dict[str, Form]:
    """The XLA forms for many pairs. A CPU and a TPU compute a block of queries at a time, which is also faster in a
    CPU's caches. A GPU computes all scores at once, but keeps none for the backward pass."""
    in_blocks = functools.partial(attend_in_blocks, known_offset=known_offset, **static)
    return {
        "cpu": without_kept(functools.partial(in_blocks, sums_by_product=True)),
        "tpu": without_kept(in_blocks),
        "default": without_kept(jax.checkpoint(functools.partial(attend_at_once, **static))),
    }


# Compiled on its own, so that calls outside jit are traced once.
@functools.partial(
    jax.jit,
    static_argnames=("offset", "implementation", "missing", "scale", "is_causal", "cap", "return_residual"),
)
def _by_platform(x: FullArrays, *, offset, implementation, missing, **static):
    """The kernel on a TPU, cuDNN on a GPU unless its requirements are `missing`, XLA elsewhere."""

    def on_tpu(name: str, *of_call: Any, **options: Any) -> Any:
        from brl_jax.attention.dense import full_tpu  # which loads Pallas

        return getattr(full_tpu, name)(*of_call, offset=offset, **static, **options)

    of_cudnn = {"scale": static["scale"], "is_causal": static["is_causal"]}

    def run_cudnn(x: FullArrays, *, interpret: bool, **known: Any):
        return _with_cudnn(x, **known, **of_cudnn)

    tpu = functools.partial(functools.partial, on_tpu)
    backends = {"tpu": [Backend("pallas", tpu("attend"), tpu("unsupported"), gradient=tpu("gradient"))]}
    # If cuDNN cannot take the call, no warning is due: XLA has the same cost.
    if not missing and _cudnn_unsupported(x, **of_cudnn) is None:
        gradient = gradient_of_known(run_cudnn)
        backends["cuda"] = [Backend("cudnn", run_cudnn, lambda *_: None, gradient=gradient)]
    return dispatch(
        "full_attention",
        implementation,
        backends,
        functools.partial(attend_at_once, **static),
        x,
        forms=_many_with_xla(offset, static),
        results=_results(x, static["return_residual"]),
        kept=_kept(x),
        cost="quadratic",
    )


def _results(x: FullArrays, return_residual: bool) -> Any:
    rows = x.query.shape[:3]
    out = jax.ShapeDtypeStruct((*rows, x.value.shape[3]), x.query.dtype)
    return (out, jax.ShapeDtypeStruct(rows, jnp.float32)) if return_residual else out


def _kept(x: FullArrays) -> Any:
    """The log-sum-exp, or cuDNN's statistics."""
    batch, length, heads, _ = x.query.shape
    return jax.ShapeDtypeStruct((batch, heads, length), jnp.float32)


def _cudnn_unsupported(x: FullArrays, *, scale: float, is_causal: bool) -> str | None:
    """Why the automatic choice must not take cuDNN, apart from `_missing_for_cudnn`; None if it may."""
    # cuDNN's output for rows without a visible key is unspecified.
    if x.query_lengths is not None or x.key_lengths is not None:
        return "it has lengths"
    return cudnn.cudnn_unsupported(functools.partial(_with_cudnn, scale=scale, is_causal=is_causal), x)


# Compiled on its own, so that gradients outside jit are traced once.
@functools.partial(jax.jit, static_argnames=("scale", "is_causal", "everywhere"))
def _through_cudnn(x: FullArrays, *, scale, is_causal, everywhere):
    """cuDNN on a GPU, or `everywhere`, for a call that meets `_missing_for_cudnn`'s requirements."""
    run = functools.partial(_with_cudnn, scale=scale, is_causal=is_causal)
    with_cudnn = Form(run, gradient_of_known(run))
    plain = functools.partial(
        attend_at_once, scale=scale, is_causal=is_causal, cap=None, return_residual=False
    )
    with_xla = without_kept(plain)
    return by_platform(
        lambda platform, *_: with_cudnn if everywhere or platform == "cuda" else with_xla,
        x,
        results=_results(x, False),
        kept=_kept(x),
        plain=plain,
        needs_devices=True,
    )


def _missing_for_cudnn(x: FullArrays, is_causal: bool, cap: float | None, return_residual: bool) -> list[str]:
    """cuDNN's requirements that the call does not meet."""
    head_dim, value_dim = x.query.shape[3], x.value.shape[3]
    needs = {
        f"bfloat16 or float16 (got {x.query.dtype})": x.query.dtype != jnp.float32,
        f"head_dim a multiple of 8 up to 128 (got {head_dim})": head_dim % 8 == 0 and head_dim <= 128,
        f"equal head_dims of value and query (got {value_dim} and {head_dim})": value_dim == head_dim,
        "no bias": x.bias is None,
        "no mask": x.mask is None,
        "no segment_ids": x.segments[0] is None,
        f"query_offset=0 if is_causal (got {x.query_offset})": not is_causal
        or (is_int(x.query_offset) and x.query_offset == 0),
        "no sinks": x.sinks is None,
        "no logits_soft_cap": cap is None,
        "no return_residual": not return_residual,
    }
    return [need for need, met in needs.items() if not met]


def _with_cudnn(
    x: FullArrays, *, scale: float, is_causal: bool, known: cudnn.Found | None = None
) -> cudnn.Found:
    """The output and cuDNN's statistics; with `known`, what an earlier run returned, only the backward pass does work.
    Ignores the arrays that `_missing_for_cudnn` refuses."""
    x = x.without_padding()
    out, statistics = cudnn.attention(
        x.query,
        x.key,
        x.value,
        known=known,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=x.query_lengths,
        key_value_seq_lengths=x.key_lengths,
    )
    seen = None if x.key_lengths is None else (x.key_lengths > 0)[:, None, None, None]
    return zero_unseen(out, seen, x.query_lengths), statistics
