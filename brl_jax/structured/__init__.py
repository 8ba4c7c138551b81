"""Structured matrices as parameter pytrees: fewer numbers than rows times columns, and high rank (002, section 3).

Each has `matmul`, `bilinear`, `to_dense`, `shape`, `num_parameters`, `flops` and `rank`; each is a sum of block tensor
contractions (`as_mlbtc`). Arrays and derivatives go through them as through any pytree.
"""

from brl_jax.structured.base import StructuredMatrix
from brl_jax.structured.low_rank import MLR, BlockLowRank, LowRank
from brl_jax.structured.mlbtc import MLBTC, BlockContraction
from brl_jax.structured.scale import limit_rms, rms_limit
from brl_jax.structured.tensor_train import BTT, Butterfly, Kronecker, Monarch

__all__ = [
    "BTT",
    "MLBTC",
    "MLR",
    "BlockContraction",
    "BlockLowRank",
    "Butterfly",
    "Kronecker",
    "LowRank",
    "Monarch",
    "StructuredMatrix",
    "limit_rms",
    "rms_limit",
]
