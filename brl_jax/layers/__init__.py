"""Flax Linen modules: projections, norms and positions around the attention functions, and their caches."""

from brl_jax.layers.brl import BRLConfig
from brl_jax.layers.full import FullConfig
from brl_jax.layers.local import LocalConfig
from brl_jax.layers.mechanism import Dimensions, Mechanism
from brl_jax.layers.mechanisms import MECHANISMS, mechanism_name

__all__ = [
    "MECHANISMS",
    "BRLConfig",
    "Dimensions",
    "FullConfig",
    "LocalConfig",
    "Mechanism",
    "mechanism_name",
]
