"""Local attention: exact softmax attention over a sparse pattern, at linear cost and without a (T, S) array.

`reference.py` gives the plain meaning. The fast forms divide the queries into blocks, each of which visits the stretch
of keys that its pattern can reach (`parts.py`); a mask computed from positions hides the keys that a query does not
see.
"""

from __future__ import annotations

import functools
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from brl_jax.attention.core.arguments import (
    check_bias,
    check_dtypes,
    check_lengths,
    check_mask,
    check_scale,
    check_segments,
    check_sinks,
    check_soft_cap,
    is_int,
)
from brl_jax.attention.core.biases import PositionBias
from brl_jax.attention.core.boundary import attention_function, batch_optional
from brl_jax.attention.core.by_platform import by_platform, without_kept
from brl_jax.attention.core.checks import check_qkv, require
from brl_jax.attention.core.dispatch import (
    Backend,
    Implementation,
    bias_unsupported,
    check_implementation,
    dispatch,
)
from brl_jax.attention.core.triton import triton_backend
from brl_jax.attention.local import cudnn, xla
from brl_jax.attention.local.call import CallArrays, PatternCall
from brl_jax.attention.local.patterns import Pattern, SlidingWindow

#: The implementations that `local_attention` takes.
IMPLEMENTATIONS = (None, "xla", "cudnn", "pallas", "pallas_interpret", "triton", "triton_interpret")


@overload
def local_attention(
    query: Array, key: Array, value: Array, bias: PositionBias | Array | None = None, mask: Array | None = None, *,
    local_window_size: int | tuple[int, int] | None = None, pattern: Pattern | None = None, is_causal: bool = False,
    scale: float | None = None, query_seq_lengths: Array | None = None, key_value_seq_lengths: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None, query_offset: int = 0, key_offset: int | Array = 0,
    sinks: Array | None = None, logits_soft_cap: float | None = None, implementation: Implementation | None = None,
    return_residual: Literal[False] = False,
) -> Array: ...  # fmt: skip


@overload
def local_attention(
    query: Array, key: Array, value: Array, bias: PositionBias | Array | None = None, mask: Array | None = None, *,
    local_window_size: int | tuple[int, int] | None = None, pattern: Pattern | None = None, is_causal: bool = False,
    scale: float | None = None, query_seq_lengths: Array | None = None, key_value_seq_lengths: Array | None = None,
    segment_ids: Array | tuple[Array, Array] | None = None, query_offset: int = 0, key_offset: int | Array = 0,
    sinks: Array | None = None, logits_soft_cap: float | None = None, implementation: Implementation | None = None,
    return_residual: Literal[True],
) -> tuple[Array, Array]: ...  # fmt: skip


@batch_optional
@attention_function
def local_attention(
    query: Float[Array, "B T N H"],
    key: Float[Array, "B S K H"],
    value: Float[Array, "B S K H"],
    bias: PositionBias | Float[Array, " ..."] | None = None,
    mask: Bool[Array, " ..."] | None = None,
    *,
    local_window_size: int | tuple[int, int] | None = None,
    pattern: Pattern | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    query_seq_lengths: Int[Array, " B"] | None = None,
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    segment_ids: Int[Array, "B T"] | tuple[Int[Array, "B T"], Int[Array, "B S"]] | None = None,
    query_offset: int = 0,
    key_offset: int | Int[Array, ""] = 0,
    sinks: Float[Array, " N"] | None = None,
    logits_soft_cap: float | None = None,
    implementation: Implementation | None = None,
    return_residual: bool = False,
) -> Float[Array, "B T N H"] | tuple[Float[Array, "B T N H"], Float[Array, "B T N"]]:
    """Softmax attention in which each query sees only the keys of a local pattern; O(n w) time and memory.

    (B, T, N, H), (B, S, K, H) x 2 -> (B, T, N, H)::

        out = local_attention(query, key, value, local_window_size=(255, 0), is_causal=True)

    out_i = sum_j p_ij v_j with p_i = softmax over the visible j of (scale q_i . k_j + bias_ij): BRL-Attention (Liu et
    al., OpenReview Vpyg3fqXbl), eq. 1. A window as wide as the sequence is full attention. A query that sees no key
    gives 0.

    Window sizes count the keys on either side of the query's own, as in `jax.nn.dot_product_attention`:
    local_window_size=(2, 1) lets query 4 see keys 2, 3, 4, 5 (x) and not the others (.)::

        key       0 1 2 3 4 5 6 7
        query 4   . . x x x x . .       with is_causal: . . x x x . . .

    The "window w" of the papers is `SlidingWindow.of_width(w, is_causal)`.

    As in `jax.nn.dot_product_attention`, query, key and value may all lack the batch axis: (T, N, H), (S, K, H) and
    (S, K, H). Then bias and mask broadcast to (N, T, S), segment ids are (T,), or (T,) and (S,), lengths have the shape
    () or (1,), and the results lack the axis too.

    Args:
      query: (B, T, N, H), float32, bfloat16 or float16.
      key, value: (B, S, K, H) of the same dtype; K divides N, and query head n reads key head n // (N / K).
      local_window_size: an int for both sides, or (left, right); exactly one of this and `pattern` is given.
      pattern: which keys a query sees (`brl_jax.attention.local.patterns`).
      is_causal: hides the keys after the query, including those that a window reaches to the right.
      bias: added to the scaled scores: a `PositionBias`, which is called on the absolute positions of one block at a
        time, or an array that broadcasts to (B, N, T, S). Both get gradients.
      mask: bools that broadcast to (B, N, T, S); a query sees only keys where it is True. It is added to an array bias,
        or to none, as -inf: kernels do not serve it, and a `PositionBias` has no place for it.
      scale: multiplies the scores; 1 / sqrt(H) by default.
      query_seq_lengths, key_value_seq_lengths: (B,) ints; queries and keys from there on are padding. Padding never
        reaches the result, even if it is NaN; padded rows give 0.
      segment_ids: any int32 of shape (B, T) if T = S, or a pair of shapes (B, T) and (B, S): a query sees only the
        keys whose id equals its own.
      query_offset: query i stands at key index i + query_offset (the keys are those of a window cache, then the new
        ones).
      key_offset: the absolute position of key 0, an int or a traced int scalar. Only patterns with absolute
        boundaries and position biases depend on it. If it is traced, such a pattern visits every block within its
        reach, or all keys if its reach is unbounded.
      sinks: for each query head a logit that takes part in the softmax and has no value, so that the weights of the
        keys add up to less than 1: p_ij = exp(score_ij) / (exp(sink) + sum_j exp(score_ij)), as in gpt-oss
        (arXiv:2508.10925). Sinks are neither scaled nor capped, and get gradients.
      logits_soft_cap: a positive number c. The scaled scores become c tanh(scale q . k / c) before bias and mask, as
        in Gemma 2 (arXiv:2408.00118, section 2).
      implementation: None picks by platform when lowering: the kernels on a TPU; on an NVIDIA GPU cuDNN, else the
        Triton kernel (docs/gpu.md), else XLA; XLA elsewhere. "xla" works everywhere; "cudnn" needs a GPU, a sliding
        window with nothing to its right and half precision; "pallas" is the TPU kernels, which take every pattern and
        offset, and biases by distance (`ALiBi`, `T5Bias`, `RotaryBias`, any `DistanceBias`) with all patterns but
        Fixed; "pallas_interpret" interprets these kernels on any platform; "triton" and
        "triton_interpret" are the GPU kernel. A call of fewer than 128 queries on more keys, such as a decoding step,
        goes to the kernels only when they are asked for. With None, a call that the kernels do not serve (an array
        bias, on a GPU any bias) runs through XLA on a TPU or GPU too, at the same O(n w), and lowering it logs a
        warning with the reason, once.
      return_residual: also return the log-sum-exp of each query's scores, with bias, soft cap and sinks in them. It has
        gradients, which that of `jax.nn.dot_product_attention` has not. cuDNN does not serve it.

    Returns:
      (B, T, N, H) in query's dtype. The softmax is computed in float32. With return_residual a pair of it and the
      log-sum-exp, (B, T, N) in query's dtype, -inf or its sink for a query that sees no key.

    Raises:
      ValueError: on shapes, dtypes, windows, patterns or implementations that do not match; the error names the
        argument.
      NotImplementedError: "pallas" or "triton" where the kernel cannot serve the call, or where the call is lowered for
        a platform on which it does not run. ("cudnn" raises ValueError where it cannot serve the call.)
    """
    check_qkv(query, key, value)
    if value.shape != key.shape:
        raise ValueError(f"value must have key's shape {key.shape}, got {value.shape}")
    check_dtypes(query, key, value)
    pattern = _check_pattern(local_window_size, pattern, is_causal)
    if not is_int(query_offset):
        raise ValueError(f"query_offset must be a static int, got {query_offset!r}")
    scale = check_scale(scale, query.shape[3])
    bias = _with_mask(check_bias(bias, query, key), check_mask(mask, query, key))
    query_lengths = check_lengths("query_seq_lengths", query_seq_lengths, query.shape[0])
    key_lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, query.shape[0])
    query_segments, key_segments = check_segments(segment_ids, query.shape, key.shape)
    static_key_offset, traced_key_offset = _split_key_offset(key_offset)
    sinks = check_sinks(sinks, query.shape[2])
    soft_cap = check_soft_cap(logits_soft_cap)

    check_implementation(implementation, *IMPLEMENTATIONS)
    call = PatternCall(
        pattern,
        bool(is_causal),
        scale,
        query.shape[1],
        key.shape[1],
        int(query_offset),
        static_key_offset,
        soft_cap,
        bool(return_residual),
    )
    arrays = CallArrays(
        query,
        key,
        value,
        bias,
        query_lengths,
        key_lengths,
        query_segments,
        key_segments,
        traced_key_offset,
        sinks,
    )
    result = _choose(call, implementation, arrays)
    return (result[0], result[1].astype(query.dtype)) if return_residual else result


# Compiled on its own, so that calls outside jit are traced once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _choose(call: PatternCall, implementation: Implementation | None, x: CallArrays):
    batch, length, heads, _ = x.query.shape
    residual = jax.ShapeDtypeStruct((batch, length, heads), jnp.float32)
    results = (x.query, residual) if call.return_residual else x.query
    plain = functools.partial(xla.plain, call)
    if implementation == "cudnn":  # by name it takes more calls than by itself
        cudnn.check(call, x)
        form = without_kept(functools.partial(cudnn.attend, call))
        return by_platform(lambda *_: form, x, results=results, plain=plain, needs_devices=True)
    backends = _backends(call)
    if implementation is not None:
        backends["cuda"] = backends["cuda"][1:]
    return dispatch(
        "local_attention",
        implementation,
        backends,
        plain,
        x,
        forms=xla.forms(call),
        results=results,
        kept=jax.ShapeDtypeStruct((batch, heads, length), jnp.float32),
    )


def _backends(call: PatternCall) -> dict[str, list[Backend]]:
    # Pallas and Triton cost import time, so they are imported when a call is lowered for their platform.
    def tpu_unsupported(x: CallArrays) -> str | None:
        from brl_jax.attention.local import tpu

        return tpu.unsupported(call, x.query, x.key, x.bias)

    def run_on_tpu(x: CallArrays, *, interpret: bool) -> Any:
        from brl_jax.attention.local import tpu

        return tpu.attend(call, x, interpret=interpret)

    def gradient_on_tpu(*given: Any, interpret: bool) -> Any:
        from brl_jax.attention.local import tpu

        return tpu.gradient(call, *given, interpret=interpret)

    def gpu_unsupported(x: CallArrays) -> str | None:
        from brl_jax.attention.local import gpu

        return bias_unsupported(x.bias) or gpu.unsupported(call, x)

    def run_on_gpu(x: CallArrays) -> Any:
        from brl_jax.attention.local import gpu

        return gpu.attend(call, x)

    def gradient_on_gpu(*given: Any) -> Any:
        from brl_jax.attention.local import gpu

        return gpu.gradient(call, *given)

    def run_cudnn(x: CallArrays, *, interpret: bool) -> Any:
        return cudnn.attend(call, x)

    # The kernels compute scores for whole tiles of queries; in a decoding step most of a tile would be empty.
    few = call.num_queries < min(128, call.num_keys)
    return {
        "tpu": [Backend("pallas", run_on_tpu, tpu_unsupported, few, gradient_on_tpu)],
        "cuda": [
            Backend("cudnn", run_cudnn, functools.partial(cudnn.unsupported, call), few),
            triton_backend(run_on_gpu, gpu_unsupported, few, gradient_on_gpu),
        ],
    }


def _with_mask(bias: Any, mask: Bool[Array, "#B #N #T #S"] | None) -> Any:
    """The bias that hides the keys where the mask is False, too."""
    if mask is None:
        return bias
    require(
        bias is None or isinstance(bias, jax.Array),
        f"mask must be None with a {type(bias).__name__}; give the bias as an array",
    )
    seen = jnp.zeros((), jnp.float32) if bias is None else bias
    return jnp.where(mask, seen, jnp.array(-jnp.inf, seen.dtype))


def _check_pattern(window: Any, pattern: Any, is_causal: bool) -> Pattern:
    if (window is None) == (pattern is None):
        raise ValueError(
            "exactly one of local_window_size and pattern must be given, got "
            + ("neither" if window is None else "both")
        )
    if window is not None:
        sides = (window, window) if is_int(window) else window
        require(
            isinstance(sides, (tuple, list)) and len(sides) == 2 and all(is_int(s) and s >= 0 for s in sides),
            f"local_window_size must be an int of at least 0 or a pair of them (left, right), got {window!r}",
        )
        return SlidingWindow(int(sides[0]), int(sides[1]))
    if not isinstance(pattern, Pattern):
        raise ValueError(f"pattern must be a Pattern such as SlidingWindow(left, right), got {pattern!r}")
    if is_causal and not pattern.causal_ok:
        raise ValueError(
            f"is_causal must be False with {type(pattern).__name__}: its global tokens see the whole sequence "
            "and are seen by all of it, so that information would travel backwards through them"
        )
    return pattern


def _split_key_offset(key_offset: Any) -> tuple[int | None, Array | None]:
    if is_int(key_offset):
        return int(key_offset), None
    require(
        hasattr(key_offset, "dtype")
        and key_offset.shape == ()
        and jnp.issubdtype(key_offset.dtype, jnp.integer),
        f"key_offset must be an int or an int scalar array, got {key_offset!r}",
    )
    return None, jnp.asarray(key_offset).astype(jnp.int32)
