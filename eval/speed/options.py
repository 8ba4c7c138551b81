"""The options of eval.speed. `eval.speed.levels.CheckedOptions` compares names with what there is to time."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from brl_jax.fields import Checked, Count, Length, Positive, Rows, Width
from brl_jax.layers import Dimensions


@dataclasses.dataclass(frozen=True)
class MeasureOptions(Checked):
    """How long to measure, and where the results go."""

    repeats: Count = 7
    """Rounds; the fastest counts."""
    patience: Positive = 20.0
    """Seconds after which a slow candidate sits out the remaining rounds (it runs at least two)."""
    limit: Positive = 120.0
    """Skips a case if a round would take longer, in seconds, judging by a shorter length."""
    json: str | None = None
    """File to write the results to, as one JSON object."""
    pictures: str | None = None
    """Folder to draw pictures in."""

    @property
    def limits(self) -> dict[str, Any]:
        """The arguments of `eval.speed.measure.measure`."""
        return {"repeats": self.repeats, "patience": self.patience, "limit": self.limit}


@dataclasses.dataclass(frozen=True)
class HeadOptions(Checked):
    """The width of calls and networks."""

    heads: Width = 4
    """Heads of query, key and value."""
    head_dim: Width = 64
    """Features of a head; a network's width is heads * head_dim."""

    @property
    def width(self) -> int:
        """Width of a network."""
        return self.heads * self.head_dim


@dataclasses.dataclass(frozen=True)
class SpeedOptions(MeasureOptions, HeadOptions):
    """What to time. All cases are self-attention, and causal if the mechanism has a causal form."""

    lengths: tuple[Length, ...] = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768)
    """Sequence lengths."""
    levels: tuple[str, ...] = ("functions", "layers")
    """functions: bare attention functions and PyTorch's; layers: one transformer layer of each mechanism; encoders:
    whole encoders of four layers that only infer, and PyTorch's (BRL-Attention's figure 6); classifiers of the Long
    Range Arena, inference and training steps (TransNormer's table 7); encoder_decoders that copy, training steps
    (BRL-Attention's figure 5); decoders of six layers, inference and training steps (its tables 6 and 7)."""
    mechanisms: tuple[str, ...] = ()
    """Mechanisms to time, by default all; for encoder_decoders, presets without their prefix (figure5-NAME of
    train.copy)."""
    window: Count = 256
    """Keys that a query of a local function sees, its own included; layers have their own defaults."""
    batch: Rows = 1
    """Sequences in a batch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the computation."""
    fit_from: Count = 2048
    """Shortest length used in fitting exponents; all lengths if fewer than two remain."""
    torch: bool = True
    """Time PyTorch's scaled_dot_product_attention too, if it is installed."""
    references: tuple[str, ...] = ()
    """More rows for the functions: jax_nn (full attention by jax.nn.dot_product_attention, whose matrix of all pairs
    must fit into a CPU's memory)."""

    def __post_init__(self):
        if not self.lengths:
            raise ValueError("lengths must be one or more, got none")

    def without_effect(self) -> dict[str, str]:
        """See `train.cli.options.parse_options`."""
        if "functions" in self.levels:
            return {}
        return dict.fromkeys(("window", "references"), "without the level functions")

    def wants(self, name: str) -> bool:
        """Whether a mechanism is to be timed."""
        return not self.mechanisms or name in self.mechanisms

    def dimensions(self, *, is_causal: bool) -> Dimensions:
        """Dimensions of a network's layers."""
        return Dimensions(
            d_model=self.width,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            d_ff=4 * self.width,
            is_causal=is_causal,
            dtype=jnp.dtype(self.dtype),
        )
