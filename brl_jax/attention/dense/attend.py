"""Full attention of checked arguments: the kernel on a TPU, cuDNN on a GPU, or XLA."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from brl_jax.attention.core import cudnn
from brl_jax.attention.core.by_platform import Form, by_platform, gradient_of_known, without_kept
from brl_jax.attention.core.checks import is_int
from brl_jax.attention.core.dispatch import Backend, Implementation, dispatch
from brl_jax.attention.dense import full_tpu
from brl_jax.attention.dense.full_xla import FullArrays, attend_at_once, attend_in_blocks, zero_unseen

#: A TPU takes the kernel from this number of queries and keys on. Below it, scores take only a few MB per head.
MANY_TOKENS = 1024


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

    def on_tpu(function: Callable[..., Any]) -> Callable[..., Any]:
        return functools.partial(function, offset=offset, **static)

    of_cudnn = {"scale": static["scale"], "is_causal": static["is_causal"]}

    def run_cudnn(x: FullArrays, *, interpret: bool, **known: Any):
        return _with_cudnn(x, **known, **of_cudnn)

    gradient = on_tpu(full_tpu.gradient)
    pallas = Backend("pallas", on_tpu(full_tpu.attend), on_tpu(full_tpu.unsupported), gradient=gradient)
    backends = {"tpu": [pallas]}
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
