"""Floating-point operations that training a decoder takes by its formulas: the measure of networks at equal compute.

Counted are the matrix products alone, pair by pair: what a token does not see costs nothing, however the attention is
computed. `train.engine.flops` counts what a program multiplies, masked parts of blocks included.
"""

from __future__ import annotations

from typing import NamedTuple

from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.layers import FullConfig, GlobalWindowConfig, LocalConfig, Mechanism, MLRConfig
from brl_jax.layers.core.modules import UNGATED
from brl_jax.models import DecoderConfig


class Multiplications(NamedTuple):
    """Multiplications of the forward pass over one row.

    Attributes:
      projections: to queries, keys and values, and of the heads' outputs.
      feed_forward: of the feed-forward networks.
      scores: products of queries and keys.
      values: products of weights and values.
      read_out: of the logits.
    """

    projections: int
    feed_forward: int
    scores: int
    values: int
    read_out: int


def decoder_multiplications(config: DecoderConfig, length: int) -> Multiplications:
    """The multiplications of a decoder's forward pass over a row of `length` tokens.

    Raises:
      ValueError: a layer whose mechanism is not full, MLR, global-window or sliding-window attention.
    """
    d = config.dimensions
    pairs = [attention_products(mechanism, d.head_dim, length) for mechanism in config.mechanisms]
    layers = len(pairs)
    heads = 2 * d.num_heads + 2 * d.num_kv_heads
    maps = 2 if d.ffn in UNGATED else 3
    return Multiplications(
        projections=layers * length * d.d_model * heads * d.head_dim,
        feed_forward=layers * length * maps * d.d_model * d.d_ff,
        scores=d.num_heads * sum(scores for scores, _ in pairs),
        values=d.num_heads * sum(values for _, values in pairs),
        read_out=length * d.d_model * config.vocab_size,
    )


def attention_products(mechanism: Mechanism, head_dim: int, length: int) -> tuple[int, int]:
    """Multiplications of one head's scores and of its values, for a causal row of `length` tokens."""
    everything = _window_pairs(length, length)
    match mechanism:
        case FullConfig():
            return everything * head_dim, everything * head_dim
        case LocalConfig(pattern="sliding"):
            pairs = _window_pairs(length, SlidingWindow.of_width(mechanism.window, True).left + 1)
            return pairs * head_dim, pairs * head_dim
        case GlobalWindowConfig():
            first, second = mechanism.parts(head_dim)
            near = _window_pairs(length, mechanism.window)
            # Two softmaxes, each of which weights the values.
            return everything * first + near * second, (everything + near) * head_dim
        case MLRConfig():
            levels = mechanism.levels(head_dim, length)
            scores = sum(
                rank * _block_pairs(length, length if size is None else size)
                for rank, size in zip(levels["ranks"], levels["block_sizes"])
            )
            return scores, everything * head_dim
    raise ValueError(f"mechanism {mechanism.name}: its multiplications are not counted")


def training_flops(config: DecoderConfig, length: int) -> float:
    """Operations of training on one token of rows of `length`: two for each multiplication, and the backward pass
    has two products for each of the forward pass.
    """
    return 6 * sum(decoder_multiplications(config, length)) / length


def _window_pairs(length: int, keys: int) -> int:
    """Pairs of a token and one of the `keys` tokens up to itself."""
    keys = min(keys, length)
    return keys * (keys + 1) // 2 + (length - keys) * keys


def _block_pairs(length: int, size: int) -> int:
    """Pairs of a token and one up to itself in the same block of `size` tokens."""
    whole, rest = divmod(length, size)
    return whole * (size * (size + 1) // 2) + rest * (rest + 1) // 2
