"""The public names and where they are defined; `__init__.py` reads this file."""

from brl_jax.attention.compressed.compress import compress
from brl_jax.attention.compressed.compress_blocks import compress_blocks
from brl_jax.attention.compressed.propagate import propagate
from brl_jax.attention.core.biases import ALiBi, DistanceBias, PositionBias, RotaryBias, T5Bias, alibi_slopes
from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.dense.hopfield import hopfield_attention
from brl_jax.attention.dense.kernelized import kernelized_attention
from brl_jax.attention.dense.synthesizer import synthesizer_attention
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.diag import diag_attention, init_diag_state
from brl_jax.attention.local.far_patterns import (
    Axial,
    BigBird,
    BlockMask,
    Fixed,
    GlobalWindow,
    Strided,
)
from brl_jax.attention.local.generation import LocalState, init_local_state
from brl_jax.attention.local.patterns import (
    BlockDiagonal,
    Bucketed,
    Dilated,
    Neighbourhood,
    Pattern,
    SlidingWindow,
    SurroundedBlocks,
)
from brl_jax.attention.low_rank.linformer import linformer_attention
from brl_jax.attention.low_rank.long_short import init_long_short_state, long_short_attention
from brl_jax.attention.low_rank.nystromformer import nystromformer_attention
from brl_jax.attention.low_rank.skyformer import skyformer_attention, skyformer_samples
from brl_jax.attention.recurrent.bsbr import bsbr_attention, init_bsbr_state
from brl_jax.attention.recurrent.cosformer import cosformer_attention, init_cosformer_state
from brl_jax.attention.recurrent.delta import (
    delta_rule,
    gated_delta_rule,
    gated_delta_rule_2,
    init_delta_state,
    kimi_delta_rule,
    rwkv7_attention,
)
from brl_jax.attention.recurrent.flowformer import flowformer_attention, init_flowformer_state
from brl_jax.attention.recurrent.gau import gau_attention, init_gau_state
from brl_jax.attention.recurrent.linear import init_linear_state, linear_attention
from brl_jax.attention.recurrent.luna import init_luna_state, luna_attention
from brl_jax.attention.recurrent.mixed_chunk import init_mixed_chunk_state, mixed_chunk_attention
from brl_jax.attention.recurrent.norm_attention import norm_attention
from brl_jax.attention.recurrent.performer import (
    init_performer_state,
    performer_attention,
    performer_projection,
)
from brl_jax.attention.recurrent.summary import Summary
from brl_jax.attention.sorting.informer import (
    informer_attention,
    init_informer_state,
)
from brl_jax.attention.sorting.native_sparse import BlockSizes, compression_blocks, native_sparse_attention
from brl_jax.attention.sorting.reformer import init_reformer_state, reformer_attention, reformer_rotations
from brl_jax.attention.sorting.sinkhorn import init_sinkhorn_state, sinkhorn_attention
from brl_jax.attention.sorting.sliceformer import sliceformer_attention
from brl_jax.attention.structured.bilinear import bilinear_btt_attention, bilinear_mlr_attention, btt_factors
from brl_jax.attention.structured.global_window import global_window_attention
from brl_jax.attention.structured.mlr import mlr_attention
from brl_jax.attention.structured.mlr_generation import init_mlr_state
from brl_jax.attention.structured.mlr_levels import doubling_block_sizes
from brl_jax.batching import Completion, Request, generate_requests
from brl_jax.decoding import generate, stream
from brl_jax.layers import (
    MECHANISMS,
    BilinearBTTConfig,
    BilinearMLRConfig,
    BRLConfig,
    BSBRConfig,
    CosformerConfig,
    DeltaNetConfig,
    DiagConfig,
    FlashConfig,
    FlowformerConfig,
    FullConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    GAUConfig,
    GLAConfig,
    GlobalWindowConfig,
    HopfieldConfig,
    InformerConfig,
    KDAConfig,
    KernelizedConfig,
    LinearConfig,
    LinformerConfig,
    LocalConfig,
    LongShortConfig,
    LunaConfig,
    Mamba2Config,
    Mechanism,
    MLRConfig,
    NativeSparseConfig,
    NormConfig,
    NystromformerConfig,
    PerformerConfig,
    ReformerConfig,
    RetNetConfig,
    RWKV7Config,
    SinkhornConfig,
    SkyformerConfig,
    SliceformerConfig,
    SynthesizerConfig,
    TLinFormerConfig,
)
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.models import (
    TRANSNORMER_SIZES,
    Classifier,
    DecoderConfig,
    DecoderLM,
    Encoder,
    EncoderConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    GraphConfig,
    MaskedLM,
    NodeClassifier,
    PairClassifier,
    Regressor,
    RegressorConfig,
    Stack,
    StackConfig,
    TokenClassifier,
    transnormer,
)
from brl_jax.speculation import Draft
from brl_jax.states import StateFunctions, state_functions

__version__: str

__all__ = [
    "MECHANISMS",
    "TRANSNORMER_SIZES",
    "ALiBi",
    "Axial",
    "BRLConfig",
    "BSBRConfig",
    "BigBird",
    "BilinearBTTConfig",
    "BilinearMLRConfig",
    "BlockDiagonal",
    "BlockMask",
    "BlockSizes",
    "Bucketed",
    "Classifier",
    "Completion",
    "CosformerConfig",
    "DecoderConfig",
    "DecoderLM",
    "DeltaNetConfig",
    "DiagConfig",
    "Dilated",
    "Dimensions",
    "DistanceBias",
    "Draft",
    "Encoder",
    "EncoderConfig",
    "EncoderDecoder",
    "EncoderDecoderConfig",
    "Fixed",
    "FlashConfig",
    "FlowformerConfig",
    "FullConfig",
    "GAUConfig",
    "GLAConfig",
    "GatedDeltaNet2Config",
    "GatedDeltaNetConfig",
    "GlobalWindow",
    "GlobalWindowConfig",
    "GraphConfig",
    "HopfieldConfig",
    "InformerConfig",
    "KDAConfig",
    "KernelizedConfig",
    "LinearConfig",
    "LinformerConfig",
    "LocalConfig",
    "LocalState",
    "LongShortConfig",
    "LunaConfig",
    "MLRConfig",
    "Mamba2Config",
    "MaskedLM",
    "Mechanism",
    "NativeSparseConfig",
    "Neighbourhood",
    "NodeClassifier",
    "NormConfig",
    "NystromformerConfig",
    "PairClassifier",
    "Pattern",
    "PerformerConfig",
    "PositionBias",
    "RWKV7Config",
    "ReformerConfig",
    "Regressor",
    "RegressorConfig",
    "Request",
    "RetNetConfig",
    "RotaryBias",
    "SinkhornConfig",
    "SkyformerConfig",
    "SliceformerConfig",
    "SlidingWindow",
    "Stack",
    "StackConfig",
    "StateFunctions",
    "Strided",
    "Summary",
    "SurroundedBlocks",
    "SynthesizerConfig",
    "T5Bias",
    "TLinFormerConfig",
    "TokenClassifier",
    "alibi_slopes",
    "bilinear_btt_attention",
    "bilinear_mlr_attention",
    "bsbr_attention",
    "btt_factors",
    "compress",
    "compress_blocks",
    "compression_blocks",
    "cosformer_attention",
    "delta_rule",
    "diag_attention",
    "doubling_block_sizes",
    "flowformer_attention",
    "full_attention",
    "gated_delta_rule",
    "gated_delta_rule_2",
    "gau_attention",
    "generate",
    "generate_requests",
    "global_window_attention",
    "hopfield_attention",
    "informer_attention",
    "init_bsbr_state",
    "init_cosformer_state",
    "init_delta_state",
    "init_diag_state",
    "init_flowformer_state",
    "init_gau_state",
    "init_informer_state",
    "init_linear_state",
    "init_local_state",
    "init_long_short_state",
    "init_luna_state",
    "init_mixed_chunk_state",
    "init_mlr_state",
    "init_performer_state",
    "init_reformer_state",
    "init_sinkhorn_state",
    "kernelized_attention",
    "kimi_delta_rule",
    "linear_attention",
    "linformer_attention",
    "local_attention",
    "long_short_attention",
    "luna_attention",
    "mixed_chunk_attention",
    "mlr_attention",
    "native_sparse_attention",
    "norm_attention",
    "nystromformer_attention",
    "performer_attention",
    "performer_projection",
    "propagate",
    "reformer_attention",
    "reformer_rotations",
    "rwkv7_attention",
    "sinkhorn_attention",
    "skyformer_attention",
    "skyformer_samples",
    "sliceformer_attention",
    "state_functions",
    "stream",
    "synthesizer_attention",
    "transnormer",
]
