"""The options of eval.speed."""

from __future__ import annotations

import dataclasses
from typing import Literal, get_args

import jax.numpy as jnp

from brl_jax.attention.core.checks import check_at_least
from brl_jax.layers import MECHANISMS, Dimensions
from eval.speed import decoders, encoder_decoders, encoders
from eval.speed.functions import CASES
from eval.speed.gpu_references import NAMES as REFERENCES
from eval.speed.networks import network_names

Level = Literal["functions", "layers", "encoders", "classifiers", "encoder_decoders", "decoders"]
# Levels of whole networks.
NETWORKS = ("encoders", "classifiers", "encoder_decoders", "decoders")
KNOWN = tuple(dict.fromkeys((*MECHANISMS, *CASES, *network_names(), *encoder_decoders.NAMES)))


@dataclasses.dataclass(frozen=True)
class SpeedOptions:
    """What to time. All cases are self-attention, causal wherever the mechanism has a causal form."""

    lengths: tuple[int, ...] = (64, 256, 1024, 2048, 4096, 8192, 16384, 32768)
    """Sequence lengths."""
    levels: tuple[Level, ...] = ("functions", "layers")
    """Bare attention functions beside PyTorch's; one transformer layer of each mechanism; whole encoders of four layers
    that only infer, beside PyTorch's (BRL-Attention's figure 6); classifiers of the Long Range Arena, inference and
    training steps (TransNormer's table 7); encoder-decoders that copy, training steps (BRL-Attention's figure 5);
    decoders of six layers, inference and training steps (its tables 6 and 7)."""
    mechanisms: tuple[str, ...] = KNOWN
    """Mechanisms to time; of encoder-decoders, networks by the names of their presets (figure5-NAME of train.copy)."""
    window: int = 256
    """Keys that a query of a local function sees, its own among them; layers have their own defaults."""
    heads: int = 4
    """Heads of query, key and value."""
    head_dim: int = 64
    """Features of a head; a layer's model width is heads * head_dim."""
    batch: int = 1
    """Sequences in a batch."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Data type of the computation."""
    repeats: int = 7
    """Rounds; the fastest counts."""
    patience: float = 20.0
    """Seconds after which a slow candidate sits out the remaining rounds (it runs two at least)."""
    limit: float = 120.0
    """A case whose round would take longer, in seconds, by what it took at a shorter length is skipped."""
    fit_from: int = 2048
    """Shortest length used in fitting exponents; all lengths if fewer than two remain."""
    torch: bool = True
    """Time PyTorch's scaled_dot_product_attention too, where it is installed."""
    references: tuple[str, ...] = ()
    """Further rows of the functions, for a machine with an NVIDIA GPU, out of cudnn_window and triton_window (ours by
    that backend), flex_window (PyTorch's FlexAttention), fla_linear, fla_deltanet and fla_gated_deltanet
    (flash-linear-attention)."""
    json: str | None = None
    """File to write the rows and exponents to, as one JSON object."""
    pictures: str | None = None
    """Folder to draw five pictures of the layers in, and one of each level of whole networks."""

    def __post_init__(self):
        check_at_least(self, "window", "heads", "head_dim", "batch", "repeats", "fit_from")
        for name in ("patience", "limit"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} must be above 0, got {getattr(self, name)}")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be one or more numbers of at least 1, got {self.lengths}")
        if not self.levels:
            raise ValueError(f"levels must be some of {', '.join(get_args(Level))}, got none")
        for name in self.mechanisms:
            if name not in KNOWN:
                raise ValueError(f"mechanisms must be out of {', '.join(KNOWN)}, got {name}")
        for name in self.references:
            if name not in REFERENCES:
                raise ValueError(f"references must be out of {', '.join(REFERENCES)}, got {name}")
        own = {
            "functions": tuple(CASES),
            "encoders": encoders.NAMES,
            "classifiers": network_names(),
            "encoder_decoders": encoder_decoders.NAMES,
            "decoders": decoders.NAMES,
        }
        for level, known in own.items():
            if self.levels == (level,) and not set(self.mechanisms) & set(known):
                raise ValueError(
                    f"mechanisms of the level {level} must be out of {', '.join(known)}, "
                    f"got {', '.join(self.mechanisms)}"
                )
        if self.pictures is not None and not {"layers", *NETWORKS} & set(self.levels):
            raise ValueError(
                f"pictures are of {', '.join(('layers', *NETWORKS))}: levels must have one of them, got "
                + ", ".join(self.levels)
            )

    def dimensions(self, *, is_causal: bool) -> Dimensions:
        """Of a network's layers."""
        width = self.heads * self.head_dim
        return Dimensions(
            d_model=width,
            num_heads=self.heads,
            num_kv_heads=self.heads,
            head_dim=self.head_dim,
            d_ff=4 * width,
            is_causal=is_causal,
            dtype=jnp.dtype(self.dtype),
        )
