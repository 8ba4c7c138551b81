"""Rotary positions: vectors are rotated by their positions, so that their products depend on distances."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.scores import accumulation_dtype
from brl_jax.fields import Checked, Count, Positive

RopeScalingKind = Literal["none", "linear", "llama3", "yarn"]


@dataclasses.dataclass(frozen=True)
class RopeScaling(Checked):
    """Slower rotary frequencies, so that a network can read longer sequences than it was trained on.

    "linear"  divides all frequencies by `factor`, which interpolates positions (Chen et al. 2023, arXiv:2306.15595);
    "llama3"  divides only low frequencies (Llama 3, arXiv:2407.21783, following its published code);
    "yarn"    does the same with another transition, and scales queries and keys (Peng et al. 2023, arXiv:2309.00071).

    Raises:
      ValueError: an unknown kind, or numbers out of range.
    """

    kind: RopeScalingKind = "none"
    """Which frequencies to divide; "none" leaves all unchanged."""
    factor: Positive = 1.0
    """The divisor."""
    original_length: Count = 8192
    """Length of the sequences that the network was trained on; for "llama3" and "yarn"."""
    slow_turns: Positive = 1.0
    """Frequencies with fewer turns than this over `original_length` are divided by the whole factor."""
    fast_turns: Positive = 4.0
    """Frequencies with more turns than this stay unchanged; between the two, the divisor grows gradually."""
    query_key_factor: Positive = 1.0
    """Multiplies rotated queries and keys ("yarn")."""
    truncate: bool = True
    """Whether the transition starts and ends at whole pairs of features ("yarn")."""

    def __post_init__(self):
        if not self.slow_turns < self.fast_turns:
            raise ValueError(f"fast_turns must be above slow_turns={self.slow_turns}, got {self.fast_turns}")

    def frequencies(self, theta: float, head_dim: int) -> Float[np.ndarray, " half"]:
        """The angle per position of each pair of features, float64."""
        plain = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
        if self.kind == "none":
            return plain
        if self.kind == "linear":
            return plain / self.factor
        if self.kind == "llama3":
            turns = self.original_length * plain / (2 * math.pi)
            kept = (turns - self.slow_turns) / (self.fast_turns - self.slow_turns)
        else:
            # The index, a real number, of the pair with this many turns; the transition is linear in the index.
            first, last = (
                head_dim * math.log(self.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))
                for turns in (self.fast_turns, self.slow_turns)
            )
            if self.truncate:
                first, last = math.floor(first), math.ceil(last)
            first, last = max(first, 0.0), min(last, head_dim - 1.0)
            kept = 1 - (np.arange(head_dim // 2, dtype=np.float64) - first) / max(last - first, 1e-3)
        kept = np.clip(kept, 0.0, 1.0)
        return plain * kept + plain / self.factor * (1 - kept)


def rotate(
    x: Float[Array, "B T N H"],
    positions: Int[Array, "#B T"],
    theta: float = 10000.0,
    scaling: RopeScaling | None = None,
    rotary_dim: int | None = None,
) -> Float[Array, "B T N H"]:
    """Rotary position embedding on adjacent pairs (Su et al. 2021, arXiv:2104.09864, eq. 34).

    Each position is split into a low and a high part, and the high part's angle is reduced modulo 2 pi in advance. That
    keeps float32 angles accurate to 1e-3 at positions in the millions.

    Args:
      x: (B, T, N, H) with H even.
      positions: (B, T) or (1, T), not negative.
      theta: base of the frequencies theta^(-2 i / H).
      scaling: changes the frequencies.
      rotary_dim: how many features of a head, from the first, are rotated; None for all H.

    Raises:
      ValueError: the number of rotated features is odd.
    """
    if rotary_dim is not None:
        turned = rotate(x[..., :rotary_dim], positions, theta, scaling)
        return jnp.concatenate([turned, x[..., rotary_dim:]], axis=-1)
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"rotary positions need an even head_dim, got {head_dim}")
    low = 1024
    scaling = RopeScaling() if scaling is None else scaling
    frequency = scaling.frequencies(theta, head_dim)
    step = np.remainder(low * frequency, 2 * math.pi)
    angle = (positions % low).astype(jnp.float32)[..., None] * jnp.asarray(frequency, jnp.float32)[None, None]
    angle += (positions // low).astype(jnp.float32)[..., None] * jnp.asarray(step, jnp.float32)[None, None]
    cos = jnp.cos(angle)[:, :, None, :]
    sin = jnp.sin(angle)[:, :, None, :]
    accumulate = accumulation_dtype(x.dtype)
    even, odd = x[..., 0::2].astype(accumulate), x[..., 1::2].astype(accumulate)
    cos, sin = cos.astype(accumulate), sin.astype(accumulate)
    if scaling.query_key_factor != 1.0:
        cos, sin = cos * scaling.query_key_factor, sin * scaling.query_key_factor
    rotated = jnp.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
    return rotated.reshape(x.shape).astype(x.dtype)
