"""Two mechanisms in parallel in one layer."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import flax.linen as nn
from jaxtyping import Array, Float

from brl_jax.layers.core.protocol import CacheOwner, Dimensions, Mechanism


def _of_both(flag: str) -> property:
    """A capability flag: whether both mechanisms have it."""
    return property(lambda self: getattr(self.first, flag) and getattr(self.second, flag))


@dataclasses.dataclass(frozen=True)
class SideBySideConfig(Mechanism):
    """Two mechanisms on the same input, whose outputs are concatenated and projected (TransNormer, arXiv:2210.10340,
    table 12).

    [a; b] (W_a; W_b) = a W_a + b W_b, so each mechanism keeps its output projection and the results are added. It can
    do what both can do. It is not in `MECHANISMS`; networks use it through `schedule="parallel"`.
    """

    first: Mechanism
    second: Mechanism

    @property
    def both(self) -> dict[str, Mechanism]:
        """The mechanisms, by the names of their modules and caches."""
        return {"first": self.first, "second": self.second}

    causal = _of_both("causal")
    bidirectional = _of_both("bidirectional")
    linear_cost = _of_both("linear_cost")
    packs = _of_both("packs")
    packs_bidirectional = _of_both("packs_bidirectional")
    decodes = _of_both("decodes")
    any_head_dim = _of_both("any_head_dim")

    def check(self, dimensions: Dimensions) -> None:
        for mechanism in self.both.values():
            mechanism.check(dimensions)
            carries = mechanism.segment is not None or mechanism.carrier(dimensions, parent=None) is not None
            if carries or mechanism.residual != self.residual:
                raise ValueError(
                    f"mechanism {mechanism.name} cannot share a layer with another: it has a carry "
                    "or normalises elsewhere"
                )


class BothCaches(NamedTuple):
    """Decoding caches or training memories of the two layers."""

    first: Any
    second: Any


class SideBySide(CacheOwner, config=SideBySideConfig):
    mechanism: SideBySideConfig

    def _layer(self, which: str, **kwargs: Any) -> nn.Module:
        # The joint projection has twice as large a fan-in, so each half starts with half the variance.
        halved = dataclasses.replace(self.dimensions, residual_scale=self.dimensions.residual_scale / 2)
        return self.mechanism.both[which].layer(halved, **kwargs)

    def _unbound(self) -> tuple[Any, Any]:
        return self._layer("first", parent=None), self._layer("second", parent=None)

    def init_cache(self, batch: int, length: int) -> BothCaches:
        return BothCaches(*(layer.init_cache(batch, length) for layer in self._unbound()))

    def init_memory(self, batch: int) -> BothCaches:
        return BothCaches(*(layer.init_memory(batch) for layer in self._unbound()))

    def memory_from_cache(self, cache: BothCaches) -> BothCaches:
        return BothCaches(*(layer.memory_from_cache(own) for layer, own in zip(self._unbound(), cache)))

    def resume(self, cache: BothCaches, memory: BothCaches) -> BothCaches:
        return BothCaches(*(layer.resume(*own) for layer, *own in zip(self._unbound(), cache, memory)))

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], *, carry: Any = None, cache: Any = None, **call: Any):
        first, second = (None, None) if cache is None else cache
        y_first, _, first = self._layer("first", name="first")(x, cache=first, **call)
        y_second, _, second = self._layer("second", name="second")(x, cache=second, **call)
        return y_first + y_second, carry, None if cache is None else BothCaches(first, second)
