"""The listed mechanisms: one line makes a mechanism known to models, scripts and the suite of laws."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from brl_jax.layers.bilinear import BilinearBTTConfig, BilinearMLRConfig
from brl_jax.layers.brl import BRLConfig
from brl_jax.layers.bsbr import BSBRConfig
from brl_jax.layers.cosformer import CosformerConfig
from brl_jax.layers.deltanet import DeltaNetConfig
from brl_jax.layers.diag import DiagConfig
from brl_jax.layers.full import FullConfig
from brl_jax.layers.gau import FlashConfig, GauConfig
from brl_jax.layers.global_window import GlobalWindowConfig
from brl_jax.layers.hopfield import HopfieldConfig
from brl_jax.layers.linear import LinearConfig
from brl_jax.layers.linformer import LinformerConfig
from brl_jax.layers.local import LocalConfig
from brl_jax.layers.mechanism import Mechanism
from brl_jax.layers.mlr import MLRConfig
from brl_jax.layers.norm import NormConfig
from brl_jax.layers.performer import PerformerConfig
from brl_jax.layers.tlinformer import TLinFormerConfig

MECHANISMS: Mapping[str, type[Mechanism]] = MappingProxyType(
    {
        "full": FullConfig,
        "local": LocalConfig,
        "brl": BRLConfig,
        "diag": DiagConfig,
        "linformer": LinformerConfig,
        "hopfield": HopfieldConfig,
        "linear": LinearConfig,
        "deltanet": DeltaNetConfig,
        "norm": NormConfig,
        "cosformer": CosformerConfig,
        "performer": PerformerConfig,
        "gau": GauConfig,
        "flash": FlashConfig,
        "bsbr": BSBRConfig,
        "tlinformer": TLinFormerConfig,
        "mlr": MLRConfig,
        "bilinear_mlr": BilinearMLRConfig,
        "bilinear_btt": BilinearBTTConfig,
        "global_window": GlobalWindowConfig,
    }
)


def mechanism_name(mechanism: Mechanism) -> str:
    """The name under which a configuration's class is listed."""
    for name, kind in MECHANISMS.items():
        if type(mechanism) is kind:
            return name
    raise ValueError(f"{type(mechanism).__name__} is not listed in MECHANISMS")
