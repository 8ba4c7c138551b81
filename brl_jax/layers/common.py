"""Pieces that the layers share: projections with logical axis names, norms, rotary positions, gated feed-forward."""

from __future__ import annotations

import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brl_jax.attention.scores import accumulation_dtype
from brl_jax.layers.mechanism import Dimensions


def dense(
    dimensions: Dimensions,
    features: int | tuple[int, ...],
    axes: tuple[str, ...],
    *,
    name: str,
    **kwargs: Any,
) -> nn.Module:
    """A linear map whose kernel carries the logical axis names `axes`, one for each kernel dimension.

    `contract` (keyword): how many trailing axes of the input to contract (default 1); `scale` (keyword): variance
    factor of the initial weights (default 1); `use_bias` (keyword) overrides the network's.
    """
    contract = kwargs.pop("contract", 1)
    scale = kwargs.pop("scale", 1.0)
    use_bias = kwargs.pop("use_bias", dimensions.use_bias)
    outputs = len(axes) - contract
    # DenseGeneral hands its initialiser the flattened (in, out) shape, so fan-in counts every contracted axis.
    kernel_init = nn.initializers.variance_scaling(scale, "fan_in", "truncated_normal")
    return nn.DenseGeneral(
        features,
        axis=tuple(range(-contract, 0)),
        use_bias=use_bias,
        kernel_init=nn.with_logical_partitioning(kernel_init, axes),
        bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), axes[-outputs:]),
        dtype=dimensions.dtype,
        param_dtype=dimensions.param_dtype,
        name=name,
        **kwargs,
    )


def parameter(
    module: nn.Module, name: str, init: Any, shape: tuple[int, ...], axes: tuple[str | None, ...]
) -> Any:
    """A parameter of `module` that carries logical axis names."""
    dtype = module.dimensions.param_dtype  # type: ignore[attr-defined]
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, dtype)


def norm(dimensions: Dimensions, *, name: str, axis: str = "embed", scale: float = 1.0) -> nn.Module:
    """LayerNorm or RMSNorm over the last axis, with statistics in float32; `scale` is its weights' first value."""
    shared: dict[str, Any] = {
        "epsilon": 1e-5,
        "dtype": dimensions.dtype,
        "param_dtype": dimensions.param_dtype,
        "scale_init": nn.with_logical_partitioning(nn.initializers.constant(scale), (axis,)),
        "name": name,
    }
    if dimensions.norm == "rms":
        return nn.RMSNorm(**shared)
    bias_init = nn.with_logical_partitioning(nn.initializers.zeros_init(), (axis,))
    return nn.LayerNorm(use_bias=dimensions.use_bias, bias_init=bias_init, **shared)


def head_norm(dimensions: Dimensions, *, name: str) -> nn.Module:
    """A norm of each head by itself, (..., N, H) over H with a scale for each head and channel."""
    shared: dict[str, Any] = {
        "epsilon": 1e-5,
        "dtype": dimensions.dtype,
        "param_dtype": dimensions.param_dtype,
        "scale_init": nn.with_logical_partitioning(nn.initializers.ones_init(), ("heads", "head_dim")),
        "reduction_axes": -1,
        "feature_axes": (-2, -1),
        "name": name,
    }
    if dimensions.norm == "rms":
        return nn.RMSNorm(**shared)
    return nn.LayerNorm(use_bias=False, **shared)


class FeedForward(nn.Module):
    """W2 (ReLU(W1 x) * W3 x), the gated network of BRL-Attention (eq. 5)."""

    dimensions: Dimensions

    @nn.compact
    def __call__(self, x: Float[Array, "*B T D"]) -> Float[Array, "*B T D"]:
        d = self.dimensions
        width = x.shape[-1]
        gate = jax.nn.relu(dense(d, d.d_ff, ("embed", "mlp"), name="gate")(x))
        up = dense(d, d.d_ff, ("embed", "mlp"), name="up")(x)
        return dense(d, width, ("mlp", "embed"), name="down", scale=d.residual_scale)(gate * up)


def rotate(
    x: Float[Array, "B T N H"], positions: Int[Array, "#B T"], theta: float = 10000.0
) -> Float[Array, "B T N H"]:
    """Rotary position embedding on adjacent pairs (Su et al. 2021, arXiv 2104.09864, eq. 34).

    The angle position * frequency is put together from the position's low and high part, the latter's step reduced
    modulo 2 pi beforehand, so that angles stay accurate to 1e-3 at positions of millions in float32.

    Args:
      x: (B, T, N, H) with H even; positions: (B, T) or (1, T), not negative.
      theta: base of the frequencies theta^(-2 i / H).

    Raises:
      ValueError: if H is odd.
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"rotary positions need an even head_dim, got {head_dim}")
    low = 1024
    frequency = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    step = np.remainder(low * frequency, 2 * math.pi)
    angle = (positions % low).astype(jnp.float32)[..., None] * jnp.asarray(frequency, jnp.float32)[None, None]
    angle += (positions // low).astype(jnp.float32)[..., None] * jnp.asarray(step, jnp.float32)[None, None]
    cos = jnp.cos(angle)[:, :, None, :]
    sin = jnp.sin(angle)[:, :, None, :]
    accumulate = accumulation_dtype(x.dtype)
    even, odd = x[..., 0::2].astype(accumulate), x[..., 1::2].astype(accumulate)
    cos, sin = cos.astype(accumulate), sin.astype(accumulate)
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)


def token_positions(length: int, start: Any = 0) -> Int[Array, "1 T"]:
    """Positions start..start+length-1 as (1, length)."""
    return (jnp.arange(length, dtype=jnp.int32) + jnp.asarray(start, jnp.int32))[None]


def project_qkv(dimensions: Dimensions, x: Float[Array, "B T D"], positions: Int[Array, "#B T"]):
    """Query (B, T, N, H), key and value (B, T, K, H) of a layer, rotated to their positions.

    Called inside a compact module, to which the parameters `query`, `key` and `value` belong.
    """
    d = dimensions
    query = dense(d, (d.num_heads, d.head_dim), ("embed", "heads", "head_dim"), name="query")(x)
    key = dense(d, (d.num_kv_heads, d.head_dim), ("embed", "kv_heads", "head_dim"), name="key")(x)
    value = dense(d, (d.num_kv_heads, d.head_dim), ("embed", "kv_heads", "head_dim"), name="value")(x)
    if d.rope_theta is not None:
        query, key = rotate(query, positions, d.rope_theta), rotate(key, positions, d.rope_theta)
    return query, key, value


def merge_heads(dimensions: Dimensions, attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
    """The output projection of a layer; called inside a compact module, to which the parameter `out` belongs."""
    d = dimensions
    axes = ("heads", "head_dim", "embed")
    return dense(d, d.d_model, axes, name="out", contract=2, scale=d.residual_scale)(attended)
