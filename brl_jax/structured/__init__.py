"""Structured matrices as parameter pytrees: high rank with far fewer parameters than a dense matrix.

Each has `matmul`, `bilinear`, `to_dense`, `shape`, `num_parameters`, `flops` and `rank`, and each is a sum of block
tensor contractions (`as_mlbtc`). Like any pytree, they can be mapped, differentiated and sharded. Equation and section
numbers in this package refer to "Customizing the Inductive Biases of Softmax Attention using Structured Matrices"
(arXiv:2509.07963, section 3).
"""

from brl_jax.structured.low_rank import MLR, BlockLowRank, LowRank
from brl_jax.structured.mlbtc import MLBTC, BlockContraction, StructuredMatrix
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
