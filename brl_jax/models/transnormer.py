"""TransNormer (arXiv:2210.10340): block-diagonal attention in the early layers, normalised linear attention in the
late ones."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from brl_jax.fields import Count, declared
from brl_jax.layers.core.protocol import NormKind
from brl_jax.layers.local.diag import DiagConfig
from brl_jax.layers.recurrent.norm_attention import NormConfig
from brl_jax.models.config import StackConfig

Variant = Literal["t1", "t2"]
C = TypeVar("C", bound=StackConfig)

# Table 13 of the paper and, for the Long Range Arena, appendix E. Table 13 interchanges the widths of the first two
# GLUs: tables 4 and 5 count 155.99M and 124.67M parameters, and "wikitext103" has 155.99M with 1365 and 162.29M with
# 2048. The counts need the biases that the authors' GLU has (OpenNLPLab/fairseq-evo, `fairseq/modules/glu.py`).
TRANSNORMER_SIZES: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "wikitext103": {"num_layers": 6, "d_model": 512, "num_heads": 8, "d_ff": 1365, "ffn_bias": True},
        "roberta": {"num_layers": 12, "d_model": 768, "num_heads": 12, "d_ff": 2048, "ffn_bias": True},
        "lra": {"num_layers": 2, "d_model": 64, "num_heads": 2, "d_ff": 85},
    }
)


@declared
def transnormer(
    variant: Variant,
    kind: type[C],
    *,
    block_size: Count = 64,
    attention_norm: NormKind = "rms",
    **options: Any,
) -> C:
    """Returns the configuration of a TransNormer decoder or encoder.

        config = transnormer("t2", DecoderConfig, **TRANSNORMER_SIZES["wikitext103"], vocab_size=50265)

    The first half of the layers uses DiagAttention, the rest NormAttention, and the feed-forward networks are GLUs with
    swish. T1 has ReLU attention inside its blocks and elu features in its linear attention; T2 has softmax and 1 + elu
    (arXiv:2210.10340, section 5). The paper's ablations are options: tables 8 (`early_layers`), 9
    (`swap_mechanisms=True`: NormAttention first), 10 (`ffn="relu"`), 11 (`block_size` 32, 64 or 128) and 12
    (`schedule="alternate"`, also swapped, or "parallel").

    Args:
      variant: "t1" or "t2".
      kind: the configuration's class: `DecoderConfig`, or `StackConfig` for the layers of an encoder
        (`Stack(config.mechanisms, config.make_dimensions(is_causal=False))`).
      block_size: tokens in a block of DiagAttention.
      attention_norm: the norm inside NormAttention and T1's DiagAttention; `norm=` sets the norms between sublayers.
      options: fields of `kind`, such as `**TRANSNORMER_SIZES["lra"]`.

    Raises:
      ValueError: the variant is unknown, or `kind` rejects a setting.
    """
    if not (isinstance(kind, type) and issubclass(kind, StackConfig)):
        raise ValueError(f"kind must be a class of configurations, such as DecoderConfig, got {kind!r}")
    t1 = variant == "t1"
    early = DiagConfig(block_size=block_size, score="relu" if t1 else "softmax", norm=attention_norm)
    late = NormConfig(feature_map="elu" if t1 else "elu+1", norm=attention_norm)
    fields: dict[str, Any] = {"mechanism": early, "late_mechanism": late, "ffn": "swiglu"}
    return kind(**fields | options)
