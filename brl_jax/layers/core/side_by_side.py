"""Two mechanisms side by side in one layer."""

from __future__ import annotations

import dataclasses
from typing import Any

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.layers.core.protocol import Dimensions, Mechanism


@dataclasses.dataclass(frozen=True)
class ParallelConfig(Mechanism):
    """Two mechanisms on one input, their outputs concatenated before one projection (TransNormer, table 12).

    [a; b] (W_a; W_b) = a W_a + b W_b: each keeps its own output projection and the results are added. It can do what
    both can. Not listed: networks get it by `schedule="parallel"`.
    """

    first: Mechanism
    second: Mechanism

    @property
    def both(self) -> dict[str, Mechanism]:
        """The mechanisms by the names of their modules and caches."""
        return {"first": self.first, "second": self.second}

    @property
    def causal(self) -> bool:
        return self.first.causal and self.second.causal

    @property
    def bidirectional(self) -> bool:
        return self.first.bidirectional and self.second.bidirectional

    @property
    def linear_cost(self) -> bool:
        return self.first.linear_cost and self.second.linear_cost

    @property
    def packs(self) -> bool:
        return self.first.packs and self.second.packs

    @property
    def decodes(self) -> bool:
        return self.first.decodes and self.second.decodes

    def check(self, dimensions: Dimensions) -> None:
        for mechanism in self.both.values():
            mechanism.check(dimensions)
            carries = mechanism.segment is not None or mechanism.carrier(dimensions, parent=None) is not None
            if carries or mechanism.residual != self.residual:
                raise ValueError(
                    f"mechanism {type(mechanism).__name__} cannot share a layer with another: it passes on a carry "
                    "or normalises elsewhere"
                )

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return Parallel(self, dimensions, **kwargs)


class Parallel(nn.Module):
    """See `brl_jax.layers.core.protocol` for the call."""

    mechanism: ParallelConfig
    dimensions: Dimensions

    def _layer(self, which: str, **kwargs: Any) -> nn.Module:
        # The joint projection has twice the inputs, so each half of it starts with half the variance.
        halved = dataclasses.replace(self.dimensions, residual_scale=self.dimensions.residual_scale / 2)
        return self.mechanism.both[which].layer(halved, **kwargs)

    def _each(self, method: str, *arguments: Any) -> dict[str, Any]:
        return {
            name: getattr(self._layer(name, parent=None), method)(*arguments) for name in self.mechanism.both
        }

    def init_cache(self, batch: int, length: int) -> dict[str, Any]:
        return self._each("init_cache", batch, length)

    def init_memory(self, batch: int) -> dict[str, Any]:
        return self._each("init_memory", batch)

    def memory_from_cache(self, cache: Any) -> dict[str, Any]:
        return {
            name: self._layer(name, parent=None).memory_from_cache(cache[name])
            for name in self.mechanism.both
        }

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], *, carry: Any = None, cache: Any = None, **call: Any):
        outputs, new = [], {}
        for name in self.mechanism.both:
            own = None if cache is None else cache[name]
            y, _, new[name] = self._layer(name, name=name)(x, cache=own, **call)
            outputs.append(y)
        return outputs[0] + outputs[1], carry, None if cache is None else new
