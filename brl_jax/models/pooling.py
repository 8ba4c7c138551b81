"""Pools a sequence's token outputs into one vector."""

from __future__ import annotations

from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.layers.core.modules import parameter
from brl_jax.layers.core.protocol import Dimensions
from pallas_kernels.absent import existing

PoolingKind = Literal["mean", "max", "cls"]


class Pooling(nn.Module):
    """The mean or maximum of a row's valid tokens, or the output of a learned token in front of them ("cls").

    An encoder puts `prefix(batch)`, (B, 1, D) or None, in front of each row. `pooling(outputs, lengths)` then maps the
    outputs, prefix included, to float32 (B, D). `lengths` (B,) ints count each row's valid tokens without the prefix;
    None: all are valid. The mean and the maximum of a row without tokens are zeros.
    """

    dimensions: Dimensions
    kind: PoolingKind = "mean"

    def setup(self):
        if self.kind == "cls":
            unit = nn.initializers.normal(1.0)  # as large as the tokens
            self.cls: Any = parameter(self, "cls", unit, (self.dimensions.d_model,), ("embed",))

    def prefix(self, batch: int) -> Float[Array, "B 1 D"] | None:
        """Returns the rows to put in front of every sequence, or None."""
        if self.kind != "cls":
            return None
        width = self.dimensions.d_model
        return jnp.broadcast_to(self.cls.astype(self.dimensions.dtype), (batch, 1, width))

    def __call__(
        self, outputs: Float[Array, "B T D"], lengths: Int[Array, "B"] | None = None
    ) -> Float[Array, "B D"]:
        y = outputs.astype(jnp.float32)
        if self.kind == "cls":
            return y[:, 0]
        if lengths is None:
            return y.mean(axis=1) if self.kind == "mean" else y.max(axis=1)
        there = existing(lengths, y.shape[1])[..., None]
        if self.kind == "max":
            return jnp.where(there.any(axis=1), jnp.where(there, y, -jnp.inf).max(axis=1), 0.0)
        count = jnp.maximum(there.sum(axis=1), 1).astype(jnp.float32)
        return jnp.where(there, y, 0.0).sum(axis=1) / count
