"""Which mechanisms launch kernels on a TPU and on an NVIDIA GPU, by the programs that their layers are lowered to."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from brl_jax.layers import MECHANISMS
from brl_jax.models.stack import Stack
from eval.speed.layers import default_config
from eval.speed.options import SpeedOptions

_LENGTH = 2048
#: What a program of a platform contains where a kernel is launched, and who made the kernel.
_CALLS = {
    "tpu": {"tpu_custom_call": "Pallas"},
    "cuda": {"__cudnn$fmha": "cuDNN", "triton_kernel_call": "Triton"},
}


def lowered_kernels() -> dict[str, dict[str, list[str]]]:
    """For each platform, the mechanisms whose forward pass launches kernels there, and who made them."""
    return {
        platform: {name: makers for name in MECHANISMS if (makers := kernel_makers(name, platform))}
        for platform in _CALLS
    }


def kernel_makers(name: str, platform: str) -> list[str]:
    """Who made the kernels of a mechanism's layer in bfloat16; nobody if XLA computes all of it."""
    config = default_config(name, _LENGTH)
    dimensions = SpeedOptions(dtype="bfloat16").dimensions(is_causal=config.causal)
    stack = Stack((config,) * config.group, dimensions)
    x = jax.ShapeDtypeStruct((1, _LENGTH, dimensions.d_model), jnp.bfloat16)
    variables = jax.eval_shape(lambda key, x: nn.unbox(stack.init(key, x)), jax.random.key(0), x)

    def forward(variables: Any, x: Any) -> Any:
        return stack.apply(variables, x)[0]

    text = jax.jit(forward).trace(variables, x).lower(lowering_platforms=(platform,)).as_text()
    return [maker for call, maker in _CALLS[platform].items() if call in text]
