"""Attention mechanisms as Flax Linen modules: projections, norms, positions and caches around the functions."""

from collections.abc import Mapping
from types import MappingProxyType

from brl_jax.layers.compressed.brl import BRLConfig
from brl_jax.layers.compressed.tlinformer import TLinFormerConfig
from brl_jax.layers.core.protocol import Dimensions as Dimensions
from brl_jax.layers.core.protocol import Mechanism
from brl_jax.layers.dense.full import FullConfig
from brl_jax.layers.dense.hopfield import HopfieldConfig
from brl_jax.layers.dense.kernelized import KernelizedConfig
from brl_jax.layers.dense.synthesizer import SynthesizerConfig
from brl_jax.layers.local.diag import DiagConfig
from brl_jax.layers.local.local_attention import LocalConfig
from brl_jax.layers.low_rank.linformer import LinformerConfig
from brl_jax.layers.low_rank.long_short import LongShortConfig
from brl_jax.layers.low_rank.nystromformer import NystromformerConfig
from brl_jax.layers.low_rank.skyformer import SkyformerConfig
from brl_jax.layers.recurrent.bsbr import BSBRConfig
from brl_jax.layers.recurrent.cosformer import CosformerConfig
from brl_jax.layers.recurrent.deltanet import DeltaNetConfig
from brl_jax.layers.recurrent.flowformer import FlowformerConfig
from brl_jax.layers.recurrent.gated_deltanet import GatedDeltaNetConfig
from brl_jax.layers.recurrent.gau import FlashConfig, GAUConfig
from brl_jax.layers.recurrent.gla import GLAConfig
from brl_jax.layers.recurrent.kda import GatedDeltaNet2Config, KDAConfig
from brl_jax.layers.recurrent.linear import LinearConfig
from brl_jax.layers.recurrent.luna import LunaConfig
from brl_jax.layers.recurrent.mamba2 import Mamba2Config
from brl_jax.layers.recurrent.norm_attention import NormConfig
from brl_jax.layers.recurrent.performer import PerformerConfig
from brl_jax.layers.recurrent.retnet import RetNetConfig
from brl_jax.layers.recurrent.rwkv7 import RWKV7Config
from brl_jax.layers.sorting.informer import InformerConfig
from brl_jax.layers.sorting.native_sparse import NativeSparseConfig
from brl_jax.layers.sorting.reformer import ReformerConfig
from brl_jax.layers.sorting.sinkhorn import SinkhornConfig
from brl_jax.layers.sorting.sliceformer import SliceformerConfig
from brl_jax.layers.structured.bilinear import BilinearBTTConfig, BilinearMLRConfig
from brl_jax.layers.structured.global_window import GlobalWindowConfig
from brl_jax.layers.structured.mlr import MLRConfig

#: One line here makes a mechanism available to models, scripts and the suite of laws.
MECHANISMS: Mapping[str, type[Mechanism]] = MappingProxyType(
    {
        "full": FullConfig,
        "local": LocalConfig,
        "brl": BRLConfig,
        "diag": DiagConfig,
        "linformer": LinformerConfig,
        "nystromformer": NystromformerConfig,
        "kernelized": KernelizedConfig,
        "synthesizer": SynthesizerConfig,
        "skyformer": SkyformerConfig,
        "long_short": LongShortConfig,
        "informer": InformerConfig,
        "native_sparse": NativeSparseConfig,
        "reformer": ReformerConfig,
        "sinkhorn": SinkhornConfig,
        "sliceformer": SliceformerConfig,
        "hopfield": HopfieldConfig,
        "linear": LinearConfig,
        "retnet": RetNetConfig,
        "gla": GLAConfig,
        "mamba2": Mamba2Config,
        "deltanet": DeltaNetConfig,
        "gated_deltanet": GatedDeltaNetConfig,
        "kda": KDAConfig,
        "gated_deltanet_2": GatedDeltaNet2Config,
        "rwkv7": RWKV7Config,
        "norm": NormConfig,
        "cosformer": CosformerConfig,
        "performer": PerformerConfig,
        "flowformer": FlowformerConfig,
        "luna": LunaConfig,
        "gau": GAUConfig,
        "flash": FlashConfig,
        "bsbr": BSBRConfig,
        "tlinformer": TLinFormerConfig,
        "mlr": MLRConfig,
        "bilinear_mlr": BilinearMLRConfig,
        "bilinear_btt": BilinearBTTConfig,
        "global_window": GlobalWindowConfig,
    }
)

for _name, _kind in MECHANISMS.items():
    _kind.name = _name
