"""The listed mechanisms: one line makes a mechanism known to models, scripts and the suite of laws."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from brl_jax.layers.brl import BRLConfig
from brl_jax.layers.full import FullConfig
from brl_jax.layers.local import LocalConfig
from brl_jax.layers.mechanism import Mechanism

MECHANISMS: Mapping[str, type[Mechanism]] = MappingProxyType(
    {
        "full": FullConfig,
        "local": LocalConfig,
        "brl": BRLConfig,
    }
)


def mechanism_name(mechanism: Mechanism) -> str:
    """The name under which a configuration's class is listed."""
    for name, kind in MECHANISMS.items():
        if type(mechanism) is kind:
            return name
    raise ValueError(f"{type(mechanism).__name__} is not listed in MECHANISMS")
