"""Low-rank changes to dense weights (LoRA, Hu et al. 2021, arXiv:2106.09685).

With `DecoderConfig.lora_rank` each dense map of a layer computes W x + (alpha / rank) B A x. A starts as normal numbers
and B as zeros, so that the network starts as the one without.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from brl_jax.layers.core.modules import LORA
from brl_jax.models.decoder import DecoderConfig


def merged(config: DecoderConfig, params: Mapping[str, Any]) -> tuple[DecoderConfig, dict[str, Any]]:
    """Returns the same network with its low-rank changes added to its weights, in float32.

        config, params = merged(model.config, variables["params"])
        model, variables = DecoderLM(config), {"params": params}

    Args:
      config, params: of a `DecoderLM`; the parameters are unboxed.
    """
    if not config.lora_rank:
        return config, dict(params)
    leaves = traverse_util.flatten_dict(dict(params))
    scale = config.lora_alpha / config.lora_rank
    for *module, name in list(leaves):
        if name != LORA[0]:
            continue
        down, up = (leaves.pop((*module, part)) for part in LORA)
        kernel = leaves[*module, "kernel"]
        stacked = (down.ndim + up.ndim - 2 - kernel.ndim) * (len(kernel),)  # equal layers
        down = down.reshape(*stacked, -1, config.lora_rank)
        up = up.reshape(*stacked, config.lora_rank, -1)
        change = jnp.matmul(down, up, precision=jax.lax.Precision.HIGHEST).reshape(kernel.shape)
        leaves[*module, "kernel"] = kernel.astype(jnp.float32) + scale * change
    return dataclasses.replace(config, lora_rank=0), traverse_util.unflatten_dict(leaves)
