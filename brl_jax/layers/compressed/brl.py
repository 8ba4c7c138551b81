"""BRL attention: local attention plus compressed tokens that read the past (Liu et al., OpenReview Vpyg3fqXbl,
algorithm 1).

A sequence is cut into blocks, and each block has m compressed tokens. They read only the history before the block, so
that no token depends on later ones. They evolve from layer to layer alongside the main tokens, and the block's tokens
read them. An encoder has a single block, the whole sequence, and its history is the sequence itself.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

import flax.linen as nn

from brl_jax.attention.core.scores import Score
from brl_jax.fields import Count, Range
from brl_jax.layers.compressed.brl_layer import BRLAttention, BRLCarrier
from brl_jax.layers.core.protocol import Dimensions, Residual
from brl_jax.layers.local.local_attention import LocalConfig, PatternConfig

Memory = Literal["output", "layer"]
Generation = Literal["blocks", "all"]
Formulation = Literal["algorithm", "equations"]
Phi = Literal["linear", "spiky"]
Bias = Literal["none", "t5", "alibi"]
CompressScale = Literal["m1", "rsqrt", "learned"]
CompressPositions = Literal["none", "rope"]


@dataclasses.dataclass(frozen=True)
class BRLConfig(PatternConfig):
    """BRL attention: local attention plus compressed tokens (OpenReview Vpyg3fqXbl; its symbols in brackets).

        config = DecoderConfig(mechanism=BRLConfig(window=128, num_compressed=64))

    The local attention has a `window` [w] and a `pattern` [D], any of the mechanism "local".
    """

    num_compressed: Annotated[int, Range(0, 256)] = 64
    """Compressed tokens of a block [m], at most 256; 0 leaves only local attention. Recall needs about two for each
    fact that a history holds (docs/recall.md)."""
    compressed_dim: Count | None = None
    """Their width [d_ct]; None for the model's. Tokens half as wide recall nearly as much with three quarters of
    the operations, but learn it in more steps (docs/recall.md)."""
    block_size: Count | None = None
    """Tokens that share one set of compressed tokens, which read what precedes the block; None for `window`. Shorter
    blocks cost more and recall no more. In a longer one, tokens of the block beyond the window are not seen at all."""
    history_size: Count | None = 512
    """How many tokens before a block its compressed tokens read [n_hist]; None for the block's size. What lies further
    back is forgotten (docs/recall.md). On text 64 tokens were as good as 512 after short training (docs/results.md)."""
    memory: Memory = "layer"
    """What the compressed tokens read. "layer": each layer's inputs, for all blocks at once and with gradient; in an
    encoder this is section 2.4 of the paper. "output": the network's final outputs (algorithm 1), block after block and
    without gradient; in an encoder, the network's input, which is a set of tokens unless positions are added to it.
    "layer" recalls facts on every seed of our runs, "output" on one of three (docs/recall.md)."""
    generation: Generation = "blocks"
    """What the compressed tokens read during generation: completed blocks only, as in training, or all earlier tokens
    (figure 11)."""
    formulation: Formulation = "algorithm"
    """Which form to use where algorithm 1 and equations 4-12 differ. "equations" has a ReLU around the evolved tokens,
    adds the propagated values without norm and ReLU, puts norms after the sublayers, and has no feed-forward network
    for the compressed tokens."""
    input_norm: bool = True
    """Whether "algorithm" normalises a layer's input, which algorithm 1 as printed does not."""
    phi: Phi = "linear"
    """Feature map of the propagation's queries: linear, or its clipped exponential ("spiky")."""
    score: Score = "softmax"
    """How compression and propagation turn logits into weights [sigma]."""
    bias: Bias = "none"
    """Relative bias in compression and propagation [b_rel], by the distance between a token and the start of the block.
    An encoder's compressed tokens have positions spread evenly over the sequence. GPU kernels refuse a bias."""
    gamma: float | None = None
    """Weight of compression's second attention. None learns it, from three parameters for each head; 0 disables it."""
    lambda_init: float = 0.5
    """Initial value of the propagation's learned strength [lambda], one for each head. In "equations" (equations 4 and
    9) it scales what a head propagates, so figure 7a's ablation over lambda refers to this formulation. "algorithm"
    normalises the propagated values over all heads, ReLU(LN(lambda prop)), which cancels a common scale: only the signs
    of the strengths and the ratios between heads matter, and an initial value of 0 disables the propagation."""
    beta: Annotated[float, Range(0, 1)] = 0.0
    """Share of the previous layer's compressed tokens in the evolved ones, 0 to 1; algorithm 1 also adds the evolved
    tokens to the previous ones. The paper and its presets use 0.5; with 0 a layer needs one matrix less
    (docs/recall.md, docs/results.md)."""
    compress_scale: CompressScale = "rsqrt"
    """Scale of compression's logits: "m1", the paper's 1 / (m sqrt(h)), which makes the softmax almost uniform at
    first; "rsqrt", 1 / sqrt(h); "learned", which starts at 1 / sqrt(h)."""
    compress_positions: CompressPositions = "rope"
    """Positions of compression's keys. "rope": rotary positions at the network's `rope_theta` (if it has one), relative
    to the start of the block in a decoder, and to positions spread evenly over the sequence in an encoder. "none": no
    positions, as in the paper; the compressed tokens then read a set (docs/recall.md)."""

    def __post_init__(self):
        super().__post_init__()
        if self.bias == "t5" and self.num_compressed and self.history <= 16:
            raise ValueError(
                f"history_size (or block_size, if that is None) must be above 16 with bias='t5', "
                f"got {self.history}"
            )

    def without_effect(self) -> dict[str, str]:
        """See `train.cli.options.parse_options`."""
        unused = super().without_effect()
        if not self.num_compressed:
            names = ("compressed_dim", "phi", "score", "bias", "gamma", "lambda_init", "beta")
            unused |= dict.fromkeys((*names, "compress_scale", "compress_positions"), "with num_compressed 0")
        return unused

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
        # With memory "output", blocks start at multiples of their size in the row. A packed sequence would be cut into
        # other blocks than the same sequence alone, and would have other compressed tokens.
        return super().packs and (self.memory == "layer" or not self.num_compressed)

    @property
    def packs_bidirectional(self) -> bool:
        # An encoder's compressed tokens read the whole row.
        return False

    @property
    def local(self) -> LocalConfig:
        """The local attention's configuration."""
        fields = dataclasses.fields(PatternConfig)
        return LocalConfig(**{field.name: getattr(self, field.name) for field in fields})

    @property
    def block(self) -> int:
        """Tokens in a block."""
        return self.window if self.block_size is None else self.block_size

    @property
    def history(self) -> int:
        """Tokens that a block's compressed tokens read."""
        return self.block if self.history_size is None else self.history_size

    def num_blocks(self, length: int, decoding: bool) -> int:
        """The largest number of blocks that `length` tokens touch; when decoding, they may start inside a block."""
        if self.segment is not None:
            return 1
        if decoding:
            return (length + self.block - 2) // self.block + 1
        return -(-length // self.block)

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

    def check_shards(self, length: int, devices: int) -> None:
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
