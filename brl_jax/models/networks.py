"""Which class arranges the layers of a network."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.models.stack import Stack
from brl_jax.models.tlinformer.stack import TLinFormerStack

# By `Mechanism.network`.
NETWORKS: Mapping[str | None, type[Stack]] = MappingProxyType({None: Stack, "tlinformer": TLinFormerStack})


def make_stack(mechanisms: tuple[Mechanism, ...], dimensions: Dimensions, *args: Any, **kwargs: Any) -> Stack:
    """The stack of these layers, of the class that their mechanism names; further arguments as for `Stack`."""
    return NETWORKS[mechanisms[0].network](mechanisms, dimensions, *args, **kwargs)
