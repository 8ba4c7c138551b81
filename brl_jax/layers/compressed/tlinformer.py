"""TLinFormer's configuration; its network is in `brl_jax.models.tlinformer`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar, Literal

import flax.linen as nn
import numpy as np
from jaxtyping import Int

from brl_jax.fields import Count, Natural
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.layers.dense.full import FullAttention, FullConfig


@dataclasses.dataclass(frozen=True)
class TLinFormerConfig(Mechanism):
    """Softmax attention over the whole history; all layers of a block but the first see it through a few context tokens
    (TLinFormer, Tang 2025, arXiv:2508.20407).

    The parameters have the structure of a decoder with full attention. Its layers form blocks of `hidden` + 2.
    """

    bidirectional: ClassVar[bool] = False

    network: ClassVar[str] = "tlinformer"

    window: Count = 256
    """Tokens that share one state of the history [W_og]; each full window then becomes part of the history."""
    context: Count | Literal["auto"] = 256
    """How many tokens at the end of the history the other layers compute [W_oh]; "auto": 12 ln(history), rounded up to
    a multiple of 8."""
    hidden: Natural = 2
    """Layers between the one that compresses a block's history and the one that restores it [H]."""

    @property
    def segment(self) -> int | None:
        return self.window

    @property
    def group(self) -> int:
        return self.hidden + 2

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        self.check(dimensions)  # the layer checks full attention's forms
        return FullAttention(FullConfig(), dimensions, **kwargs)

    def context_sizes(self, windows: int) -> Int[np.ndarray, " windows"]:
        """Returns the number of context tokens in each of the first `windows` windows of a sequence."""

        def size(history: int) -> int:
            if self.context == "auto":
                return min(history, math.ceil(12 * math.log(history) / 8) * 8) if history > 1 else history
            return min(history, self.context)

        return np.asarray([size(i * self.window) for i in range(windows)], np.int32)
