"""Flax Linen modules: projections, norms and positions around the attention functions, and their caches."""

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
from brl_jax.layers.mechanism import Dimensions, Mechanism
from brl_jax.layers.mechanisms import MECHANISMS, mechanism_name
from brl_jax.layers.mlr import MLRConfig
from brl_jax.layers.norm import NormConfig
from brl_jax.layers.performer import PerformerConfig
from brl_jax.layers.tlinformer import TLinFormerConfig

__all__ = [
    "MECHANISMS",
    "BRLConfig",
    "BSBRConfig",
    "BilinearBTTConfig",
    "BilinearMLRConfig",
    "CosformerConfig",
    "DeltaNetConfig",
    "DiagConfig",
    "Dimensions",
    "FlashConfig",
    "FullConfig",
    "GauConfig",
    "GlobalWindowConfig",
    "HopfieldConfig",
    "LinearConfig",
    "LinformerConfig",
    "LocalConfig",
    "MLRConfig",
    "Mechanism",
    "NormConfig",
    "PerformerConfig",
    "TLinFormerConfig",
    "mechanism_name",
]
