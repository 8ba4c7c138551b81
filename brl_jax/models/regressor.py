"""A network over sequences of vectors: numbers in, numbers out for each token; any listed mechanism, causal or not."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.fields import Length, Width
from brl_jax.layers.core.modules import dense
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.models.config import StackConfig
from brl_jax.models.inputs import Inputs, Positions
from brl_jax.models.networks import make_stack


@dataclasses.dataclass(frozen=True)
class RegressorConfig(StackConfig):
    """Size and parts of a network from sequences of vectors to sequences of vectors."""

    positions: Positions = "rope"
    """Rotary positions (of base rope_theta), vectors added to the inputs (learned, or sines and cosines), or none."""
    is_causal: bool = True
    """Whether outputs may depend on earlier tokens only."""
    num_inputs: Width = 1
    """Numbers in each input vector."""
    num_outputs: Width = 1
    """Numbers in each output vector."""
    max_length: Length = 1024
    """Tokens of the longest sequence; "learned" positions have a vector for each."""

    def __post_init__(self):
        super().__post_init__()
        self.make_dimensions(self.is_causal)  # refuses mechanisms that cannot serve

    @property
    def dimensions(self) -> Dimensions:
        """The dimensions that each layer is built with."""
        return self.make_dimensions(self.is_causal)

    @property
    def rotary_base(self) -> float | None:
        return self.rope_theta if self.positions == "rope" else None


class Regressor(nn.Module):
    """Sequences (B, T, I) floats to (B, T, O) float32: a linear map, positions, a stack of blocks, and a linear map
    that starts at zero, as in the in-context regression of arXiv:2509.07963, section 4.

    Args of the call:
      inputs: (B, T, I).
      lengths: (B,) ints in 1..T, how many vectors of each row exist, the first ones; None: all. A causal network
        ignores them, as later vectors change nothing there.
      deterministic: False applies dropout, with the random stream "dropout".

    Raises:
      ValueError: inputs or lengths of another shape or type, more than max_length vectors, and lengths outside 1..T
        where their values are known.
    """

    config: RegressorConfig

    def setup(self):
        c, d = self.config, self.config.dimensions
        self.inputs = Inputs(d, c.num_inputs, kind="features", added=c.positions, max_length=c.max_length)
        nn.share_scope(self, self.inputs)
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
        x = self.dropout(self.inputs(inputs, lengths), deterministic=deterministic)
        y, _ = self.stack(x, lengths=lengths, deterministic=deterministic)
        return self.read_out(y).astype(jnp.float32)
