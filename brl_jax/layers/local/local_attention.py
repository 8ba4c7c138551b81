"""Local attention as a layer, with a cache of the tokens that its pattern can reach."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

from jaxtyping import Array, Float

from brl_jax.attention.local import far_patterns, patterns
from brl_jax.attention.local.api import local_attention
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention, SoftmaxConfig, SoftmaxLayer
from brl_jax.layers.core.caches import WindowCache
from brl_jax.layers.core.protocol import LayerCall, Mechanism

LocalPattern = Literal[
    "sliding", "dilated", "block", "bucketed", "strided", "fixed", "global", "bigbird", "axial", "neighbourhood",
    "block_mask",
]  # fmt: skip
_BIDIRECTIONAL_ONLY = ("global", "bigbird")
_NOT_LINEAR = ("strided", "fixed", "axial", "block_mask")
# The patterns that read an option; all read the window.
_READ_BY = {
    "dilation": ("dilated",),
    "grid_width": ("axial", "neighbourhood"),
    "num_global": ("global", "bigbird"),
    "block_mask": ("block_mask",),
}


@dataclasses.dataclass(frozen=True)
class PatternConfig(Mechanism):
    """Which keys a token sees: the fields that "local" and "brl" share."""

    window: Count = 128
    """Width w: a token sees itself and the w - 1 tokens before it in a decoder, and w // 2 tokens on each side in an
    encoder. For other patterns it is the block of "block", "bigbird" and "block_mask", the bucket of "bucketed", and
    the stride of "strided" and "fixed"."""
    pattern: LocalPattern = "sliding"
    """Which keys a token sees. "global" and "bigbird" have no causal form. Two patterns are for grids that are stored
    row by row, such as images: with "axial" a token sees its row and its column (arXiv:1912.12180), and with
    "neighbourhood" the window // 2 rows and columns around it."""
    dilation: Count = 2
    """Step between the keys of "dilated"."""
    num_global: Count = 64
    """In "global", how many tokens at the start see all tokens and are seen by all; "bigbird" rounds the number up to
    whole blocks."""
    grid_width: Count = 32
    """Tokens in a row of the grid, for "axial" and "neighbourhood"."""
    block_mask: tuple[str, ...] = ()
    """In "block_mask", a row for each block of queries, with a 1 for each block of keys that they see and else a 0, as
    in 100 110 101. The rows must cover the longest sequence."""

    def __post_init__(self):
        if self.pattern == "block_mask":
            rows = self.block_mask
            if not rows or any(len(row) != len(rows[0]) or not row or set(row) - set("01") for row in rows):
                shown = " ".join(rows) or "none"
                raise ValueError(f"block_mask must be rows of 0 and 1, all of one length, got {shown}")

    def without_effect(self) -> dict[str, str]:
        """See `train.cli.options.parse_options`."""
        pattern = self.pattern
        return {
            name: f"with pattern {pattern}" for name, readers in _READ_BY.items() if pattern not in readers
        }

    @property
    def causal(self) -> bool:
        return self.pattern not in _BIDIRECTIONAL_ONLY

    @property
    def linear_cost(self) -> bool:
        return self.pattern not in _NOT_LINEAR

    @property
    def packs(self) -> bool:
        # Patterns with fixed boundaries would cut a packed sequence elsewhere than the same sequence alone.
        return self.pattern in ("sliding", "dilated")


@dataclasses.dataclass(frozen=True)
class LocalConfig(PatternConfig, SoftmaxConfig):
    """Softmax attention in which a token sees a pattern of its neighbourhood (Longformer, arXiv:2004.05150).

    config = DecoderConfig(mechanism=LocalConfig(window=256))
    """

    @functools.cache  # noqa: B019 (configurations are few and small)
    def make_pattern(self, is_causal: bool) -> patterns.Pattern:
        """Returns the pattern of a decoder (is_causal) or an encoder."""
        sliding = patterns.SlidingWindow.of_width(self.window, is_causal)
        match self.pattern:
            case "sliding":
                return sliding
            case "dilated":
                return patterns.Dilated(sliding.left, sliding.right, self.dilation)
            case "block":
                return patterns.BlockDiagonal(self.window)
            case "bucketed":
                return patterns.Bucketed(self.window)
            case "strided":
                return far_patterns.Strided(self.window)
            case "fixed":
                return far_patterns.Fixed(self.window)
            case "global":
                return far_patterns.GlobalWindow(sliding.left, sliding.right, self.num_global)
            case "axial":
                return far_patterns.Axial(self.grid_width)
            case "neighbourhood":
                return patterns.Neighbourhood(self.grid_width, self.window // 2, self.window // 2)
            case "bigbird":
                return far_patterns.BigBird(self.window, global_blocks=-(-self.num_global // self.window))
            case "block_mask":
                rows = tuple(tuple(block == "1" for block in row) for row in self.block_mask)
                return far_patterns.BlockMask(self.window, rows)
        raise ValueError(f"unknown pattern {self.pattern!r}")


class LocalAttention(SoftmaxLayer, config=LocalConfig):
    mechanism: LocalConfig

    def init_cache(self, batch: int, length: int) -> WindowCache:
        """Returns a cache for the last keys and values that the pattern can reach, at most `length`."""
        d, m = self.dimensions, self.mechanism
        covered = m.window * len(m.block_mask)
        if m.pattern == "block_mask" and length > covered:
            raise ValueError(f"block_mask must cover the cache's {length} tokens, got rows for {covered}")
        reach, _ = m.make_pattern(True).limits
        reach = length if reach is None else min(reach, length)
        return WindowCache.empty((batch, reach, d.num_kv_heads, d.head_dim), d.dtype)

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        pattern = self.mechanism.make_pattern(self.dimensions.is_causal)
        return self.softmax(local_attention, x, call, pattern=pattern)

    def step(self, attention: Attention, call: LayerCall, **options: Any) -> tuple[Array, WindowCache]:
        return call.cache.attend(attention, call, **options)
