"""The architectures of transformers that have an equivalent here."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal


@dataclasses.dataclass(frozen=True)
class LinearTensors:
    """The tensors of an architecture's Gated DeltaNet layers.

    Attributes:
      projections: for each projection, ours that it holds.
      convolutions: the tensors of the channels of queries, keys and values: one for all, or one for each.
      norm, out: the norm of the heads and the output projection.
      norm_epsilon: added to the mean square in that norm; None for rms_norm_eps.
      by_key_head: whether each projection is grouped by key head.
    """

    projections: Mapping[str, tuple[str, ...]]
    convolutions: tuple[str, ...] = ("conv1d",)
    norm: str = "norm"
    out: str = "out_proj"
    norm_epsilon: float | None = None
    by_key_head: bool = False


@dataclasses.dataclass(frozen=True)
class Architecture:
    """A decoder of transformers.

    Attributes:
      class_name: its class for language modelling.
      activation: the field that names the activation function.
      defaults: the fields that config.json may omit, and the values that transformers then uses.
      norm_offset: number that is subtracted from the norms' weights before they are stored.
      output_norms, qk_norm, qkv_bias, output_gate, post_norm: whether its blocks have them (see `StackConfig` and
        `SoftmaxConfig`).
      scales_embedding: whether embedded tokens are multiplied by the square root of the width.
      other_layers: the kind of its layers without full attention, "sliding" or "linear", if it can have such layers.
      period: without layer_types, every `period`-th layer has full attention, unless a field says otherwise.
      rope_theta: the base of its rotary frequencies if config.json has none.
      rope_by_layer: whether sliding layers have other rotary frequencies, without the scaling.
      rope_optional: whether a null as the base means no positions.
      linear: the tensors of its linear attention layers.
      norms: the norms of the inputs of a layer's mixer and feed-forward network.
      ignored: fields of its config.json that transformers never reads.
      aliases: parts of tensors' names, and what some files have in their place.
      unread: beginnings of the names of tensors that the text model does not use.
    """

    class_name: str
    defaults: Mapping[str, Any]
    activation: str = "hidden_act"
    norm_offset: float = 0.0
    output_norms: bool = False
    qk_norm: bool | Literal["merged"] = False
    qkv_bias: bool = False
    output_gate: bool = False
    post_norm: bool = False
    scales_embedding: bool = False
    other_layers: str | None = None
    period: int | None = None
    rope_theta: float = 1e4
    rope_by_layer: bool = False
    rope_optional: bool = False
    linear: LinearTensors | None = None
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    ignored: tuple[str, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    unread: tuple[str, ...] = ()


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
_OLMO_OPTIONS: dict[str, Any] = {"qk_norm": "merged", "post_norm": True}
# Gated DeltaNet and gated full attention.
_QWEN_HYBRID = {
    "head_dim": 256,
    "attention_bias": False,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
_QWEN_HYBRID_OPTIONS: dict[str, Any] = {
    "norm_offset": 1.0,
    "qk_norm": True,
    "output_gate": True,
    "other_layers": "linear",
}

ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {
        "llama": _architecture("LlamaForCausalLM", {"attention_bias": False, "mlp_bias": False}),
        "mistral": _architecture(
            "MistralForCausalLM", {"num_key_value_heads": 8, "sliding_window": 4096}, other_layers="sliding"
        ),
        "qwen2": _architecture("Qwen2ForCausalLM", _QWEN_WINDOW, qkv_bias=True, other_layers="sliding"),
        "qwen3": _architecture(
            "Qwen3ForCausalLM",
            _QWEN_WINDOW | {"head_dim": 128, "attention_bias": False},
            qk_norm=True,
            other_layers="sliding",
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
            other_layers="sliding",
            period=2,
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
            other_layers="sliding",
            rope_theta=1e6,
            rope_by_layer=True,
            ignored=("attn_logit_softcapping",),
            **_GEMMA_OPTIONS,
        ),
        "qwen3_next": _architecture(
            "Qwen3NextForCausalLM",
            {"num_key_value_heads": 2, **_QWEN_HYBRID, **EXPERTS},
            linear=LinearTensors(
                {
                    "in_proj_qkvz": ("query", "key", "value", "gate"),
                    "in_proj_ba": ("beta", "step"),
                },
                by_key_head=True,
            ),
            **_QWEN_HYBRID_OPTIONS,
        ),
        "qwen3_5_text": _architecture(
            "Qwen3_5ForCausalLM",
            {"num_key_value_heads": 4, **_QWEN_HYBRID},
            linear=LinearTensors(
                {
                    "in_proj_qkv": ("query", "key", "value"),
                    "in_proj_z": ("gate",),
                    "in_proj_b": ("beta",),
                    "in_proj_a": ("step",),
                }
            ),
            ignored=(
                "attn_output_gate",
                "mamba_ssm_dtype",
                "mtp_num_hidden_layers",
                "mtp_use_dedicated_embeddings",
            ),
            aliases=(("model.", "model.language_model."),),
            unread=("model.visual.", "mtp."),
            **_QWEN_HYBRID_OPTIONS,
        ),
        "olmo2": _architecture(
            "Olmo2ForCausalLM", {"rms_norm_eps": 1e-5, "attention_bias": False}, **_OLMO_OPTIONS
        ),
        "olmo3": _architecture(
            "Olmo3ForCausalLM",
            {"rms_norm_eps": 1e-5, "attention_bias": False, "sliding_window": 4096, "layer_types": None},
            other_layers="sliding",
            period=4,
            rope_theta=5e5,
            rope_by_layer=True,
            **_OLMO_OPTIONS,
        ),
        "smollm3": _architecture(
            "SmolLM3ForCausalLM",
            {
                "num_key_value_heads": 4,
                "tie_word_embeddings": True,
                "attention_bias": False,
                "mlp_bias": False,
                "no_rope_layers": None,
                "no_rope_layer_interval": 4,
                "use_sliding_window": False,
                "sliding_window": None,
                "layer_types": None,
            },
            other_layers="sliding",
            rope_theta=2e6,
        ),
        "olmo_hybrid": _architecture(
            "OlmoHybridForCausalLM",
            {
                "attention_bias": False,
                "layer_types": None,
                "linear_num_key_heads": None,
                "linear_num_value_heads": None,
                "linear_key_head_dim": None,
                "linear_value_head_dim": None,
                "linear_conv_kernel_dim": 4,
                "linear_allow_neg_eigval": True,
            },
            other_layers="linear",
            period=4,
            rope_optional=True,
            linear=LinearTensors(
                {
                    "q_proj": ("query",),
                    "k_proj": ("key",),
                    "v_proj": ("value",),
                    "g_proj": ("gate",),
                    "b_proj": ("beta",),
                    "a_proj": ("step",),
                },
                convolutions=("q_conv1d", "k_conv1d", "v_conv1d"),
                norm="o_norm",
                out="o_proj",
                norm_epsilon=1e-5,
            ),
            norms=("attention_layer_norm", "feedforward_layer_norm"),
            ignored=(
                "linear_a_log_max",
                "linear_a_log_min",
                "linear_dt_init_floor",
                "linear_dt_max",
                "linear_dt_min",
            ),
            # transformers names the norms after its modules in memory, or renames those of all layers.
            aliases=(
                ("attention_layer_norm", "input_layernorm"),
                ("feedforward_layer_norm", "post_attention_layernorm"),
                ("post_attention_layernorm", "feedforward_layer_norm"),
            ),
            **_OLMO_OPTIONS,
        ),
    }
)


#: Their networks of text and images; we read the text model.
_WITH_IMAGES = ("qwen3_5", "qwen3_5_moe")
#: Mixtures of experts, and the field that counts the experts.
_MIXTURES = MappingProxyType({"gpt_oss": "num_local_experts", "qwen3_5_moe_text": "num_experts"})


def text_part(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the config.json of the text model in a network of text and images; other values unchanged. Its tables are
    tied if those of the network are, whatever text_config says.

    Raises:
      ValueError: text_config is missing or not an object.
    """
    kind = values.get("model_type")
    if kind not in _WITH_IMAGES:
        return values
    text = values.get("text_config")
    if not isinstance(text, Mapping):
        raise ValueError(f"config.json: text_config must be an object for {kind}, got {text!r}")
    tied = {name: values[name] for name in ("tie_word_embeddings",) if name in values}
    return {"model_type": f"{kind}_text", **text, **tied}


def architecture_of(values: Mapping[str, Any]) -> Architecture:
    """Returns the architecture that a config.json names.

    Raises:
      ValueError: the architecture is not supported.
    """
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in _MIXTURES:
        field = _MIXTURES[kind]
        raise ValueError(
            f"config.json: {field}={values.get(field)!r} makes the layers of {kind} mixtures of experts, which are "
            "not supported"
        )
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        raise ValueError(f"config.json: model_type must be one of {', '.join(ARCHITECTURES)}, got {kind!r}")
    return ARCHITECTURES[kind]
