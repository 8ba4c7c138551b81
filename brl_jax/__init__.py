"""Linear-cost attention for JAX, from one laptop core to a TPU pod.

Functions (arrays in, arrays out; use them under your own jit, grad, vmap, shard_map):
  full_attention, local_attention, compress, compress_blocks, propagate, with the patterns and biases they take.
Networks (Flax Linen):
  DecoderLM and its DecoderConfig over any mechanism listed in MECHANISMS; generate continues prompts.
"""

from brl_jax.attention.bias import ALiBi, PositionBias, T5Bias, alibi_slopes
from brl_jax.attention.compress import compress, compress_blocks
from brl_jax.attention.full import full_attention
from brl_jax.attention.local import local_attention
from brl_jax.attention.patterns import (
    BigBird,
    BlockDiagonal,
    BlockMask,
    Bucketed,
    Dilated,
    Fixed,
    GlobalWindow,
    Pattern,
    SlidingWindow,
    Strided,
)
from brl_jax.attention.propagate import propagate
from brl_jax.decoding import generate
from brl_jax.layers import MECHANISMS, BRLConfig, FullConfig, LocalConfig, Mechanism
from brl_jax.models import DecoderConfig, DecoderLM

__all__ = [
    "MECHANISMS",
    "ALiBi",
    "BRLConfig",
    "BigBird",
    "BlockDiagonal",
    "BlockMask",
    "Bucketed",
    "DecoderConfig",
    "DecoderLM",
    "Dilated",
    "Fixed",
    "FullConfig",
    "GlobalWindow",
    "LocalConfig",
    "Mechanism",
    "Pattern",
    "PositionBias",
    "SlidingWindow",
    "Strided",
    "T5Bias",
    "alibi_slopes",
    "compress",
    "compress_blocks",
    "full_attention",
    "generate",
    "local_attention",
    "propagate",
]
