"""A network over sequences of vectors: numbers in, numbers out for each token; any listed mechanism, causal or not."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_at_least, check_choice
from brl_jax.layers.core.modules import dense, parameter
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.models.config import StackConfig
from brl_jax.models.encoder import Positions, sinusoidal_positions
from brl_jax.models.tlinformer.stack import make_stack
from brl_jax.sharding import constrain


@dataclasses.dataclass(frozen=True)
class RegressorConfig(StackConfig):
    """Size and parts of a network from sequences of vectors to sequences of vectors."""

    positions: Positions = "rope"
    """Rotary positions (of base rope_theta), or vectors added to the tokens: learned, or sines and cosines."""
    is_causal: bool = True
    """Whether outputs may depend on earlier tokens only."""
    num_inputs: int = 1
    """Numbers of a token that comes in."""
    num_outputs: int = 1
    """Numbers of a token that goes out."""
    max_length: int = 1024
    """Tokens of the longest sequence; "learned" positions have a vector for each."""

    def __post_init__(self):
        super().__post_init__()
        check_at_least(self, "num_inputs", "num_outputs", "max_length")
        check_choice("positions", self.positions, get_args(Positions))
        self.make_dimensions(self.is_causal)  # refuses mechanisms that cannot serve

    @property
    def dimensions(self) -> Dimensions:
        """What each layer is told."""
        dimensions = self.make_dimensions(self.is_causal)
        return dimensions if self.positions == "rope" else dataclasses.replace(dimensions, rope_theta=None)


class Regressor(nn.Module):
    """Sequences (B, T, I) floats to (B, T, O) float32: a linear map, positions, a stack of blocks, a linear map that is
    zero at first (002, section 4).

    `regressor(inputs, lengths=...)`: lengths (B,) ints in 1..T, how many tokens of each row exist, the first ones (not
    where causal: later tokens change nothing there); None: all. Raises ValueError for inputs of another shape, or more
    than max_length tokens.
    """

    config: RegressorConfig

    def setup(self):
        c, d = self.config, self.config.dimensions
        self.dimensions = d
        self.embedding = dense(d, c.d_model, ("inputs", "embed"), name="embedding", use_bias=True)
        if c.positions == "learned":
            unit = nn.initializers.normal(1.0)  # the size of the tokens
            self.position_table: Any = parameter(
                self, "positions", unit, (c.max_length, c.d_model), ("position", "embed")
            )
        self.stack = make_stack(c.mechanisms, d, c.remat)
        self.dropout = nn.Dropout(c.dropout)
        self.read_out = dense(
            d, c.num_outputs, ("embed", "outputs"), name="read_out", use_bias=True, scale=0.0
        )

    def __call__(
        self,
        inputs: Float[Array, "B T I"],
        *,
        lengths: Int[Array, "B"] | None = None,
        deterministic: bool = True,
    ) -> Float[Array, "B T O"]:
        c = self.config
        if inputs.ndim != 3 or 0 in inputs.shape or inputs.shape[2] != c.num_inputs:
            raise ValueError(
                f"inputs must have shape (batch, length, {c.num_inputs}), not empty, got {inputs.shape}"
            )
        length = inputs.shape[1]
        if length > c.max_length:
            raise ValueError(f"inputs must be at most max_length={c.max_length} tokens a row, got {length}")
        x = self.embedding(inputs.astype(self.dimensions.dtype))
        if c.positions == "learned":
            x = x + self.position_table[:length].astype(x.dtype)[None]
        elif c.positions == "sinusoidal":
            x = x + sinusoidal_positions(length, c.d_model).astype(x.dtype)[None]
        x = self.dropout(constrain(x, ("batch", "length", "embed")), deterministic=deterministic)
        y, _ = self.stack(x, lengths=lengths, deterministic=deterministic)
        return self.read_out(y).astype(jnp.float32)
