"""Which class of stack each mechanism needs."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.models.stack import Stack
from brl_jax.models.tlinformer import TLinFormerStack

# Keys are `Mechanism.network`.
NETWORKS: Mapping[str | None, type[Stack]] = MappingProxyType({None: Stack, "tlinformer": TLinFormerStack})


def make_stack(mechanisms: tuple[Mechanism, ...], dimensions: Dimensions, *args: Any, **kwargs: Any) -> Stack:
    """Returns a stack of these layers, of the class that their mechanism requires; other arguments as for `Stack`."""
    return NETWORKS[mechanisms[0].network](mechanisms, dimensions, *args, **kwargs)
