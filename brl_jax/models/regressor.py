"""A network from sequences of vectors to sequences of vectors, for any listed mechanism, causal or not."""

from __future__ import annotations

import dataclasses

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.fields import Length, Width
from brl_jax.layers.core.modules import dense
from brl_jax.models.config import StackConfig, check_config
from brl_jax.models.inputs import Inputs, Positions
from brl_jax.models.networks import make_stack


@dataclasses.dataclass(frozen=True)
class RegressorConfig(StackConfig):
    """Sizes and options of a network from sequences of vectors to sequences of vectors.

    config = RegressorConfig(num_inputs=3, num_outputs=1, is_causal=True)
    model = Regressor(config)
    """

    positions: Positions = "rope"
    """Rotary positions (of base rope_theta), vectors added to the inputs (learned, or sines and cosines), or none."""
    is_causal: bool = True
    """Whether outputs depend on earlier tokens only."""
    num_inputs: Width = 1
    """Numbers in each input vector."""
    num_outputs: Width = 1
    """Numbers in each output vector."""
    max_length: Length = 1024
    """Tokens of the longest sequence; "learned" positions have one vector for each."""


class Regressor(nn.Module):
    """Float32 outputs (B, T, O) for sequences of vectors (B, T, I).

        model = Regressor(RegressorConfig(num_inputs=3, num_outputs=1))
        y = model.apply(model.init(key, x), x)

    A linear map, positions, a stack of blocks, and a linear map that starts at zero, as in the in-context regression of
    arXiv:2509.07963, section 4.

    Args of the call:
      inputs: (B, T, I).
      lengths: (B,) ints in 1..T; the first `lengths[b]` vectors of row b are valid, None: all. They make no difference
        to the valid outputs of a causal network.
      deterministic: False applies dropout, with the random stream "dropout".

    Raises:
      ValueError: inputs or lengths have the wrong shape or type, a sequence has more than max_length vectors, or a
        known length is outside 1..T.
    """

    config: RegressorConfig

    def setup(self):
        check_config(self.config, RegressorConfig)
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
