"""BRL attention: local attention plus compressed tokens that read the past (algorithm 1).

A sequence is cut into blocks. Each block has its own m compressed tokens. They read only the history before the block,
so that no token depends on later tokens of its block; they evolve from layer to layer beside the main tokens; and the
block's tokens read them. In an encoder there is one block, the whole sequence, and its history is the sequence itself.
The paper is BRL-Attention (Liu et al., OpenReview Vpyg3fqXbl).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar, Literal, get_args

import flax.linen as nn

from brl_jax.attention.core.checks import check_at_least, check_choice, check_finite
from brl_jax.attention.core.scores import Score
from brl_jax.layers.compressed.brl_layer import BRLAttention, BRLCarrier
from brl_jax.layers.core.protocol import Dimensions, Mechanism, Residual
from brl_jax.layers.local.local_attention import LocalConfig

Pattern = Literal["sliding", "dilated", "block", "bucketed", "neighbourhood"]
Memory = Literal["output", "layer"]
Generation = Literal["blocks", "all"]
Formulation = Literal["algorithm", "equations"]
Phi = Literal["linear", "spiky"]
Bias = Literal["none", "t5", "alibi"]
CompressScale = Literal["m1", "rsqrt", "learned"]
CompressPositions = Literal["none", "rope"]


@dataclasses.dataclass(frozen=True)
class BRLConfig(Mechanism):
    """BRL attention: a local pattern plus compressed tokens (symbols of the paper in brackets)."""

    linear_cost: ClassVar[bool] = True

    window: int = 128
    """Width of the local attention [w], as in the mechanism `local`."""
    pattern: Pattern = "sliding"
    """Pattern of the local attention [D]; "neighbourhood" is a window in two dimensions, for images row by row."""
    dilation: int = 2
    """Step between the keys of the pattern "dilated"."""
    grid_width: int = 32
    """Tokens in a row of the grid of "neighbourhood"."""
    num_compressed: int = 64
    """Compressed tokens [m], 1 to 256; 0 for local attention only."""
    compressed_dim: int | None = None
    """Their width [d_ct]; None for the model's."""
    block_size: int | None = None
    """Tokens that share one set of compressed tokens, which read what precedes the block; None for `window`. In a
    longer block nobody sees a token of the block that lies beyond its window."""
    history_size: int | None = 512
    """How many tokens before a block its compressed tokens read [n_hist]; None for the block's size."""
    memory: Memory = "layer"
    """What they read. "layer": each layer's own inputs, all blocks at once and with gradient; in an encoder this is
    section 2.4 of the paper. "output": the network's final outputs (algorithm 1), without gradient and one block after
    the other; in an encoder the network's input, which without positions of its own is a set of tokens."""
    generation: Generation = "blocks"
    """What they read when tokens are generated one at a time: completed blocks only, as in training, or all earlier
    tokens (figure 11)."""
    formulation: Formulation = "algorithm"
    """Algorithm 1, or equations 4-12 where the two differ: "equations" has a ReLU around the evolved tokens, no norm
    and ReLU around the propagated values, norms after the sublayers, and no feed-forward network for the compressed
    tokens."""
    input_norm: bool = True
    """In "algorithm", normalise a layer's input, which algorithm 1 as printed does not."""
    phi: Phi = "linear"
    """Feature map of the propagation's queries: linear, or exp of it, clipped."""
    score: Score = "softmax"
    """What turns logits into weights in compression and propagation [sigma]."""
    bias: Bias = "none"
    """Relative bias in compression and propagation [b_rel], by the distance between a token and the block's start; in
    an encoder the compressed tokens have positions spread evenly over the sequence."""
    gamma: float | None = None
    """Weight of the second attention of compression. None: learned, by three parameters for each head. 0 switches it
    off."""
    lambda_init: float = 0.5
    """Initial value of the learned strength of the propagation [lambda], one for each head. In "equations" (equations 4
    and 9) it scales what a head propagates: this is the formulation in which figure 7a's ablation over lambda has a
    meaning. In "algorithm" the propagated values are normalised over all heads, ReLU(LN(lambda prop)), which cancels a
    common scale: the initial value has no effect (other than 0, which switches the propagation off), and of the learned
    strengths only the signs and the ratios between heads act."""
    beta: float = 0.0
    """Share of the previous layer's compressed tokens in the evolved ones, 0 to 1. Algorithm 1 adds the evolved tokens
    to the previous ones in any case. The paper has 0.5, and so have the presets with its settings. With 0 a layer needs
    a matrix less, and networks learn to recall sooner and on every seed (docs/recall.md); on text the two are within
    0.013 nats of each other, in either direction (docs/results.md)."""
    compress_scale: CompressScale = "rsqrt"
    """Scale of compression's logits: "m1", the paper's 1 / (m sqrt(h)), with which the softmax is almost uniform at
    first; "rsqrt", 1 / sqrt(h), which reached the lower held-out loss on text; "learned", which starts at 1 / sqrt(h).
    """
    compress_positions: CompressPositions = "rope"
    """What compression's keys know of where their tokens stand. "rope": rotary positions at the network's `rope_theta`
    (none in a network without), relative to the block's start in a decoder and to places spread evenly over the
    sequence in an encoder. "none": nothing, as in the paper, where the compressed tokens read a set.

    Causal recall over 128 tokens (two layers of width 64, window 8, blocks and m of 16, 480 steps of 16 rows, seeds 0
    and 1; loss of the last 40 steps, 2.08 for guessing): of one record a slot 0.02 and 0.00 with "rope", 0.00 and 0.01
    with "none", which gets below 0.1 some 40 steps earlier; of the later of two records a slot 0.40 and 0.50 with
    "rope", 0.80 and 0.79 with "none". `bias="t5"` without rotary positions (seed 0): 0.00 and 0.59."""

    def __post_init__(self):
        check_at_least(self, "window", "dilation", "grid_width")
        choices = {
            "pattern": Pattern,
            "memory": Memory,
            "generation": Generation,
            "formulation": Formulation,
            "phi": Phi,
            "score": Score,
            "bias": Bias,
            "compress_scale": CompressScale,
            "compress_positions": CompressPositions,
        }
        for name, kind in choices.items():
            check_choice(name, getattr(self, name), get_args(kind))
        if not 0 <= self.num_compressed <= 256:
            raise ValueError(f"num_compressed must be 0 to 256, got {self.num_compressed}")
        for name in ("block_size", "compressed_dim", "history_size"):
            size = getattr(self, name)
            if size is not None and size < 1:
                raise ValueError(f"{name} must be at least 1 or None, got {size}")
        if self.bias == "t5" and self.num_compressed and self.history <= 16:
            raise ValueError(
                f"history_size (block_size where it is None) must be above 16, the near distances of bias='t5', "
                f"got {self.history}"
            )
        if not 0.0 <= self.beta <= 1.0:
            raise ValueError(f"beta must be 0 to 1, got {self.beta}")
        check_finite(self, "gamma", "lambda_init")

    @property
    def residual(self) -> Residual:
        if self.formulation == "equations":
            return "post"
        return "pre" if self.input_norm else "ffn"

    @property
    def segment(self) -> int | None:
        return self.block if self.memory == "output" and self.num_compressed else None

    @property
    def num_summary(self) -> int:
        return self.num_compressed

    @property
    def packs(self) -> bool:
        # With the memory of outputs, blocks start at multiples of their size in a row, not where its sequences do: a
        # packed sequence would have other blocks than alone, and with them other compressed tokens.
        return self.local.packs and (self.memory == "layer" or not self.num_compressed)

    @property
    def packs_bidirectional(self) -> bool:
        # The compressed tokens of an encoder read its whole row.
        return False

    @property
    def local(self) -> LocalConfig:
        """The local attention inside."""
        return LocalConfig(self.window, self.pattern, self.dilation, grid_width=self.grid_width)

    @property
    def block(self) -> int:
        """Tokens of a block."""
        return self.window if self.block_size is None else self.block_size

    @property
    def history(self) -> int:
        """Tokens that the compressed tokens of a block read."""
        return self.block if self.history_size is None else self.history_size

    def width(self, dimensions: Dimensions) -> int:
        """Width of the compressed tokens."""
        return dimensions.d_model if self.compressed_dim is None else self.compressed_dim

    def check(self, dimensions: Dimensions) -> None:
        super().check(dimensions)
        if self.width(dimensions) % dimensions.num_heads:
            raise ValueError(
                f"compressed_dim must be a multiple of num_heads={dimensions.num_heads}, got {self.width(dimensions)}"
            )
        if self.compress_positions == "rope" and dimensions.rope_theta is not None:
            head = self.width(dimensions) // dimensions.num_heads
            if head % 2 and self.num_compressed:
                raise ValueError(
                    f"compress_positions='rope' needs an even compressed_dim / num_heads, got {head}; use 'none'"
                )
        if dimensions.d_model % dimensions.num_heads:
            raise ValueError(
                f"d_model must be a multiple of num_heads={dimensions.num_heads}, got {dimensions.d_model}"
            )

    def check_stretches(self, length: int, devices: int) -> None:
        if self.memory == "layer" and self.num_compressed and length // devices % self.block:
            raise ValueError(
                f"block_size must divide the {length // devices} tokens of a row that each of {devices} devices has, "
                f"got {self.block}"
            )
        if self.segment is not None and self.segment % devices:
            raise ValueError(
                f"block_size must be a multiple of the {devices} devices that share each block, got {self.segment}"
            )

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        if not self.num_compressed:
            return self.local.layer(dimensions, **kwargs)
        return BRLAttention(self, dimensions, **kwargs)

    def carrier(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module | None:
        return BRLCarrier(self, dimensions, **kwargs) if self.num_compressed else None
