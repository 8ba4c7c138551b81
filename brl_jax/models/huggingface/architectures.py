"""The architectures of transformers that have an equivalent here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder of transformers.

    Attributes:
      class_name: its class for language modelling.
      activation: the field that names the activation function.
      defaults: the fields that config.json may omit, and the values that transformers then uses.
      norm_offset: number that is subtracted from the norms' weights before they are stored.
      output_norms, qk_norm, qkv_bias, output_gate: whether its blocks have them (see `StackConfig` and
        `SoftmaxConfig`).
      scales_embedding: whether embedded tokens are multiplied by the square root of the width.
      ignored: fields of its config.json that transformers never reads.
    """

    class_name: str
    defaults: Mapping[str, Any]
    activation: str = "hidden_act"
    norm_offset: float = 0.0
    output_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_gate: bool = False
    scales_embedding: bool = False
    ignored: tuple[str, ...] = ()


def _architecture(class_name: str, defaults: Mapping[str, Any], **fields: Any) -> Architecture:
    common = {
        "num_key_value_heads": None,
        "head_dim": None,
        fields.get("activation", "hidden_act"): "silu",
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    return Architecture(class_name, MappingProxyType(common | dict(defaults)), **fields)


_QWEN_WINDOW = {
    "num_key_value_heads": 32,
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}
_GEMMA = {
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
    "use_bidirectional_attention": None,
}
# Qwen3-Next's fields for mixtures of experts.
EXPERTS = MappingProxyType(
    {
        "num_experts": 512,
        "decoder_sparse_step": 1,
        "mlp_only_layers": (),
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
    }
)
_GEMMA_OPTIONS: dict[str, Any] = {"norm_offset": 1.0, "scales_embedding": True}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": _architecture("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}),
        "mistral": _architecture("MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}),
        "qwen2": _architecture("Qwen2ForCausalLM", _QWEN_WINDOW, qkv_bias=True),
        "qwen3": _architecture(
            "Qwen3ForCausalLM", _QWEN_WINDOW | {"head_dim": 128, "attention_bias": False}, qk_norm=True
        ),
        "gemma": _architecture(
            "GemmaForCausalLM",
            {
                "num_key_value_heads": 16,
                "head_dim": 256,
                "hidden_act": "gelu_pytorch_tanh",
                "tie_word_embeddings": True,
                "attention_bias": False,
                "use_bidirectional_attention": None,
            },
            **_GEMMA_OPTIONS,
        ),
        "gemma2": _architecture(
            "Gemma2ForCausalLM",
            _GEMMA | {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
            activation="hidden_activation",
            output_norms=True,
            **_GEMMA_OPTIONS,
        ),
        "gemma3_text": _architecture(
            "Gemma3ForCausalLM",
            _GEMMA
            | {
                "final_logit_softcapping": None,
                "rope_local_base_freq": 10000.0,
                "sliding_window_pattern": 6,
            },
            activation="hidden_activation",
            output_norms=True,
            qk_norm=True,
            ignored=("attn_logit_softcapping",),
            **_GEMMA_OPTIONS,
        ),
        "qwen3_next": _architecture(
            "Qwen3NextForCausalLM",
            {
                "num_key_value_heads": 2,
                "head_dim": 256,
                "attention_bias": False,
                "partial_rotary_factor": None,
                "layer_types": None,
                "full_attention_interval": 4,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "linear_conv_kernel_dim": 4,
                **EXPERTS,
            },
            norm_offset=1.0,
            qk_norm=True,
            output_gate=True,
        ),
    }
)


def architecture_of(values: Mapping[str, Any]) -> Architecture:
    """Returns the architecture that a config.json names.

    Raises:
      ValueError: the architecture is not supported.
    """
    kind = values.get("model_type")
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"config.json: model_type must be one of {', '.join(ARCHITECTURES)}, got {kind!r}")
    return ARCHITECTURES[kind]
