"""Translates a config.json of transformers into a `DecoderConfig`, and back."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal

from brl_jax.attention.core.rotary import RopeScaling
from brl_jax.fields import Count, Fraction, Natural, NonNegative, Positive
from brl_jax.layers.core.attention_layer import SoftmaxConfig
from brl_jax.layers.core.protocol import Mechanism
from brl_jax.layers.dense.full import FullConfig
from brl_jax.layers.local.local_attention import LocalConfig
from brl_jax.layers.recurrent.gated_deltanet import GatedDeltaNetConfig
from brl_jax.models.config import ComputationType
from brl_jax.models.decoder import DecoderConfig
from brl_jax.models.huggingface.architectures import ARCHITECTURES, EXPERTS, Architecture, architecture_of
from brl_jax.models.huggingface.rope import (
    ROPE_FIELDS,
    check_fields,
    layer_rotation,
    longest,
    rotary_dim,
    rotary_factor,
    rotation_fields,
)

LAYER_TYPES: Mapping[type, str] = MappingProxyType(
    {LocalConfig: "sliding_attention", GatedDeltaNetConfig: "linear_attention"}
)
#: Their names for Gated DeltaNet's sizes, in the order of `GatedDeltaNetConfig.sizes`, and for its convolutions.
LINEAR_SIZES: Mapping[str, str] = MappingProxyType(
    {
        "linear_num_key_heads": "num_key_heads",
        "linear_num_value_heads": "num_value_heads",
        "linear_key_head_dim": "key_dim",
        "linear_value_head_dim": "value_dim",
        "linear_conv_kernel_dim": "conv_size",
    }
)
ACTIVATIONS = MappingProxyType(
    {"silu": "swiglu", "gelu_pytorch_tanh": "geglu", "gelu": "geglu_erf", "relu": "glu_relu"}
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
"""The fields of config.json from which transformers takes the special tokens' ids when it generates."""
# An architecture has some of these fields (`Architecture.defaults`).
FIELDS: Mapping[str, Any] = MappingProxyType({
    "vocab_size": Count, "hidden_size": Count, "intermediate_size": Count, "num_hidden_layers": Count,
    "num_attention_heads": Count, "num_key_value_heads": Count | None, "head_dim": Count | None,
    "max_position_embeddings": Count | None, "hidden_act": str | None, "hidden_activation": str | None,
    "rms_norm_eps": NonNegative, "tie_word_embeddings": bool | None, "attention_bias": bool | None,
    "mlp_bias": bool | None, "is_causal": Literal[True], "use_bidirectional_attention": Literal[False] | None,
    "query_pre_attn_scalar": Positive,
    "attn_logit_softcapping": Positive | None, "final_logit_softcapping": Positive | None,
    "sliding_window": Count | None, "use_sliding_window": bool | None, "max_window_layers": Natural,
    "sliding_window_pattern": Count, "full_attention_interval": Count, "layer_types": Sequence[str] | None,
    "partial_rotary_factor": Fraction, "num_experts": Natural | None, "decoder_sparse_step": Count,
    "mlp_only_layers": Sequence[int] | None, "no_rope_layers": Sequence[Natural] | None,
    "no_rope_layer_interval": Count, "linear_allow_neg_eigval": bool, **dict.fromkeys(LINEAR_SIZES, Count),
    **ROPE_FIELDS,
})  # fmt: skip
_REQUIRED = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
# Fields for training, generation or storage, which do not affect what the network computes.
_IGNORED = frozenset([
    "add_cross_attention", "architectures", "attention_dropout", "attn_implementation", "bad_words_ids",
    "begin_suppress_tokens", "bos_token_id", "cache_implementation", "chunk_size_feed_forward",
    "cross_attention_hidden_size", "decoder_start_token_id", "diversity_penalty", "do_sample", "dtype",
    "early_stopping", "encoder_no_repeat_ngram_size", "eos_token_id",
    "exponential_decay_length_penalty", "finetuning_task", "forced_bos_token_id", "forced_eos_token_id",
    "hidden_activation", "hidden_act", "id2label", "initializer_range", "is_causal", "is_decoder",
    "is_encoder_decoder", "label2id", "length_penalty", "max_length", "max_position_embeddings",
    "min_length", "model_type", "no_repeat_ngram_size", "num_beam_groups", "num_beams",
    "num_return_sequences", "output_attentions", "output_hidden_states", "output_scores",
    "pad_token_id", "prefix", "pretraining_tp", "problem_type", "pruned_heads", "remove_invalid_values",
    "repetition_penalty", "return_dict", "return_dict_in_generate", "rope_parameters", "rope_scaling",
    "rope_theta", "sep_token_id", "suppress_tokens", "task_specific_params", "temperature",
    "tf_legacy_loss", "tie_encoder_decoder", "tokenizer_class", "top_k", "top_p", "torch_dtype",
    "torchscript", "transformers_version", "typical_p", "use_bfloat16", "use_cache",
])  # fmt: skip


@dataclasses.dataclass(frozen=True)
class PretrainedConfig(DecoderConfig):
    """A loaded decoder's configuration, and the settings with which transformers generates from it."""

    model_type: str | None = dataclasses.field(default=None, compare=False)
    """The architecture that config.json names."""
    token_ids: Mapping[str, Any] = dataclasses.field(default_factory=dict, compare=False)
    """The fields of `TOKEN_IDS` that config.json has: each an id, a list of ids or None."""
    generation: Mapping[str, Any] | None = dataclasses.field(default=None, compare=False)
    """The contents of generation_config.json; None if there is no such file."""
    max_length: Count | None = dataclasses.field(default=None, compare=False)
    """The value of max_position_embeddings; None if config.json has none."""


def read_config(values: Mapping[str, Any], dtype: ComputationType = "float32") -> DecoderConfig:
    """Returns the configuration of the decoder that a config.json of transformers describes.

    Raises:
      ValueError: the architecture or an option has no equivalent here, or a field is missing or wrong.
    """
    architecture = architecture_of(values)
    known = (*_REQUIRED, *architecture.defaults)
    nullable = {name for name, default in architecture.defaults.items() if default is None}
    nullable |= {"rope_theta"} if architecture.rope_optional else set()
    given = {name: value for name, value in values.items() if value is not None or name not in nullable}
    check_fields(FIELDS, {**dict.fromkeys(_REQUIRED), **given})
    for name, value in values.items():
        is_ignored = name in _IGNORED or name in architecture.ignored or name.startswith("_")
        if name not in known and not is_ignored and value not in (None, False):
            raise ValueError(
                f"config.json: {name}={value!r} is not supported for {values['model_type']}; supported are "
                f"{', '.join(known)}, rope_theta, rope_scaling and rope_parameters"
            )
    field = {name: values.get(name, default) for name, default in architecture.defaults.items()}
    heads, width = values["num_attention_heads"], values["hidden_size"]
    bias = bool(field.get("attention_bias"))
    if "num_experts" in field:
        _check_dense(values["num_hidden_layers"], field)
    rotates = _rotates(values["num_hidden_layers"], field)
    kinds = _layer_kinds(values, architecture, field, rotates)
    shared: dict[str, Any] = {
        "qk_norm": architecture.qk_norm,
        "qkv_bias": True if architecture.qkv_bias else None,
        "logits_soft_cap": field.get("attn_logit_softcapping"),
        "output_gate": architecture.output_gate,
        "post_norm": architecture.post_norm,
    }
    if "query_pre_attn_scalar" in field:
        shared["scale"] = float(field["query_pre_attn_scalar"]) ** -0.5
    if "partial_rotary_factor" in field:
        size = rotary_dim(values, architecture, field["head_dim"] or width // heads)
        shared["rotary_dim"] = size
    rotations = {kind: layer_rotation(values, architecture, kind) for kind in ("full", "sliding")}
    theta = rotations["sliding" if "sliding" in kinds and "full" not in kinds else "full"][0]

    def mechanism(kind: str, is_rotated: bool) -> Mechanism:
        if kind == "linear":
            return _gated_deltanet(values, field, architecture)
        own, scaling = rotations[kind]
        options = shared | {"rope_theta": None if own == theta else own, "rope_scaling": scaling}
        if not is_rotated:
            options |= {"rope_theta": None, "rope_scaling": RopeScaling(), "rotary_dim": 0}
        return (
            FullConfig(**options)
            if kind == "full"
            else LocalConfig(window=field["sliding_window"], **options)
        )

    return DecoderConfig(
        num_layers=values["num_hidden_layers"],
        d_model=width,
        num_heads=heads,
        num_kv_heads=field["num_key_value_heads"] or heads,
        head_dim=field["head_dim"] or width // heads,
        d_ff=values["intermediate_size"],
        ffn=_feed_forward(values, architecture, field[architecture.activation]),
        rope_theta=theta,
        norm="rms",
        norm_epsilon=field["rms_norm_eps"],
        output_norms=architecture.output_norms,
        use_bias=bias,
        ffn_bias=bool(field.get("mlp_bias")),
        dtype=dtype,
        vocab_size=values["vocab_size"],
        tied_embeddings=bool(field["tie_word_embeddings"]),
        embedding_scale=None if architecture.scales_embedding else 1.0,
        final_soft_cap=field.get("final_logit_softcapping"),
        **_schedule([mechanism(*layer) for layer in zip(kinds, rotates)], field),
    )


def _gated_deltanet(
    values: Mapping[str, Any], field: Mapping[str, Any], architecture: Architecture
) -> GatedDeltaNetConfig:
    """The linear attention layers."""
    if field["attention_bias"]:
        raise ValueError("config.json: attention_bias must be false with linear_attention layers, got true")
    # transformers applies the same activation to their convolutions.
    if (activation := field[architecture.activation]) != "silu":
        raise ValueError(
            f"config.json: {architecture.activation} must be silu with linear_attention layers, got {activation!r}"
        )
    assert architecture.linear is not None  # else it would not have such layers
    sizes = {ours: field[theirs] for theirs, ours in LINEAR_SIZES.items()}
    for number in ("num_key_heads", "num_value_heads"):
        sizes[number] = sizes[number] or values["num_attention_heads"]
    # OLMo Hybrid's defaults; the others have fixed ones.
    sizes["key_dim"] = sizes["key_dim"] or int(0.75 * values["hidden_size"] / sizes["num_key_heads"])
    sizes["value_dim"] = sizes["value_dim"] or 2 * sizes["key_dim"]
    return GatedDeltaNetConfig(
        **sizes,
        negative_eigenvalues=field.get("linear_allow_neg_eigval", False),
        norm_epsilon=architecture.linear.norm_epsilon,
    )


def _rotates(layers: int, field: Mapping[str, Any]) -> list[bool]:
    """Returns whether each layer has rotary positions."""
    if "no_rope_layers" not in field:
        return [True] * layers
    marks = field["no_rope_layers"]
    if marks is None:
        return [(i + 1) % field["no_rope_layer_interval"] != 0 for i in range(layers)]
    if len(marks) < layers:
        raise ValueError(f"config.json: no_rope_layers must have {layers} numbers, got {len(marks)}")
    return [bool(mark) for mark in marks[:layers]]


def _check_dense(layers: int, field: Mapping[str, Any]) -> None:
    """Raises ValueError if a layer has a mixture of experts instead of a single feed-forward network."""
    dense, step = field["mlp_only_layers"] or (), field["decoder_sparse_step"]
    sparse = [i for i in range(layers) if i not in dense and (i + 1) % step == 0]
    if field["num_experts"] and sparse:
        raise ValueError(
            f"config.json: num_experts={field['num_experts']} makes {len(sparse)} of {layers} layers mixtures of "
            "experts, which are not supported; num_experts must be 0, or mlp_only_layers must list all layers"
        )


def _feed_forward(values: Mapping[str, Any], architecture: Architecture, activation: Any) -> Any:
    if values["model_type"] == "gemma" and activation == "gelu":
        activation = "gelu_pytorch_tanh"  # transformers reads the old name as this
    if activation not in ACTIVATIONS:
        raise ValueError(
            f"config.json: {architecture.activation} must be one of {', '.join(ACTIVATIONS)}, got {activation!r}"
        )
    return ACTIVATIONS[activation]


def _layer_kinds(
    values: Mapping[str, Any], architecture: Architecture, field: Mapping[str, Any], rotates: Sequence[bool]
) -> list[str]:
    """Returns "full", "sliding" or "linear" for each layer."""
    layers, other = values["num_hidden_layers"], architecture.other_layers
    if other is None:
        return ["full"] * layers
    window = field.get("sliding_window") if field.get("use_sliding_window", True) else None
    periods = (field.get("full_attention_interval"), field.get("sliding_window_pattern"), architecture.period)
    period = next((each for each in periods if each is not None), None)
    if field.get("layer_types") is not None:
        kinds = _named_kinds(field["layer_types"], layers, ("full", other))
    elif period is not None:
        kinds = [other if (i + 1) % period else "full" for i in range(layers)]
    elif window is None:
        kinds = ["full"] * layers
    elif "no_rope_layers" in field:
        kinds = ["full" if is_rotated else other for is_rotated in rotates]
    else:
        first = field.get("max_window_layers", 0)
        kinds = [other if i >= first else "full" for i in range(layers)]
    if "sliding" in kinds and (not isinstance(window, int) or window < 1):
        raise ValueError(
            f"config.json: sliding_window must be a number of tokens for sliding_attention, got {window!r}"
        )
    return kinds


def _named_kinds(types: Sequence[str], layers: int, known: Sequence[str]) -> list[str]:
    """Returns the kinds of layers that layer_types lists."""
    names = {f"{kind}_attention": kind for kind in known}
    wrong = [name for name in types if name not in names]
    if wrong or len(types) != layers:
        raise ValueError(
            f"config.json: layer_types must be {layers} of {', '.join(names)}, got {wrong or len(types)}"
        )
    return [names[name] for name in types]


def _schedule(mechanisms: Sequence[Mechanism], field: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of `StackConfig` that give each layer its mechanism."""
    layers, first = len(mechanisms), mechanisms[0]
    second = next((each for each in mechanisms if each != first), None)
    if second is None:
        return {"mechanism": first}
    run = list(mechanisms).index(second)
    fields = {"mechanism": first, "late_mechanism": second, "early_layers": run}
    if list(mechanisms) == [first] * run + [second] * (layers - run):
        return fields | {"schedule": "split"}
    if list(mechanisms) == [second if i % (run + 1) == run else first for i in range(layers)]:
        return fields | {"schedule": "alternate"}
    name = "layer_types" if field.get("no_rope_layers") is None else "no_rope_layers (with layer_types)"
    number = {mechanism: str(i) for i, mechanism in enumerate(dict.fromkeys(mechanisms))}
    raise ValueError(
        f"config.json: {name} must be one kind and then the other, or repeat a number of layers of one kind and one of "
        f"the other, got the kinds {', '.join(number[each] for each in mechanisms)}"
    )


def write_config(config: DecoderConfig, max_length: int | None) -> tuple[str, dict[str, Any]]:
    """Returns the `model_type` and the config.json of an architecture that computes the same as the decoder, if
    possible of the one that it was read from.

    Raises:
      ValueError: no architecture does; the message names the nearest one and how it differs.
    """
    differing: list[
        tuple[bool, list[str], str]
    ] = []  # first, whether it has layers that the architecture lacks
    own = config.model_type if isinstance(config, PretrainedConfig) else None
    for kind, architecture in sorted(ARCHITECTURES.items(), key=lambda item: item[0] != own):
        values = _describe(kind, architecture, config, max_length)
        try:
            described = meaning(read_config(values))
        except ValueError as error:
            differing.append((True, ["mechanism"], f"{kind} ({error})"))
            continue
        wanted = meaning(config)
        names = [name for name in wanted if wanted[name] != described[name]]
        if not names:
            return kind, values
        differing.append((False, names, kind))
    _, names, nearest = min(differing, key=lambda each: (each[0], len(each[1])))
    raise ValueError(
        f"no supported architecture of transformers ({', '.join(ARCHITECTURES)}) computes this network; the nearest, "
        f"{nearest}, differs in {', '.join(names)}"
    )


def meaning(config: DecoderConfig) -> dict[str, Any]:
    """Returns what a configuration's network computes, by field name. Configurations that describe the same network
    differently give equal results."""
    d = config.dimensions

    def resolved(mechanism: Any) -> Any:
        if isinstance(mechanism, GatedDeltaNetConfig):
            names = ("num_key_heads", "num_value_heads", "key_dim", "value_dim")
            epsilon = d.norm_epsilon if mechanism.norm_epsilon is None else mechanism.norm_epsilon
            sizes: dict[str, Any] = dict(zip(names, mechanism.sizes(d)))
            return dataclasses.replace(mechanism, chunk_size=1, norm_epsilon=_rounded(epsilon), **sizes)
        if not isinstance(mechanism, SoftmaxConfig):
            return mechanism
        rotated = d.head_dim if mechanism.rotary_dim is None else mechanism.rotary_dim
        positions: dict[str, Any] = {"rotary_dim": 0, "rope_theta": None, "rope_scaling": RopeScaling()}
        if d.rope_theta is not None and rotated:
            positions = {"rotary_dim": rotated, "rope_theta": _rounded(mechanism.rope_theta or d.rope_theta)}
        return dataclasses.replace(
            mechanism,
            scale=_rounded(d.head_dim**-0.5 if mechanism.scale is None else mechanism.scale),
            qkv_bias=d.use_bias if mechanism.qkv_bias is None else mechanism.qkv_bias,
            **positions,
        )

    scale = math.sqrt(d.d_model) if config.embedding_scale is None else config.embedding_scale
    same = (
        "num_layers",
        "mup_base_width",
        "cross_attention",
        "vocab_size",
        "tied_embeddings",
        "final_soft_cap",
    )
    resolves = ("d_model", "num_heads", "num_kv_heads", "head_dim", "d_ff", "ffn", "norm", "output_norms")
    return {
        **{name: getattr(config, name) for name in same},
        **{name: getattr(d, name) for name in (*resolves, "reversible", "use_bias", "ffn_bias")},
        "norm_epsilon": _rounded(d.norm_epsilon),
        "embedding_scale": _rounded(scale),
        "mechanism": tuple(resolved(mechanism) for mechanism in config.mechanisms),
    }


def _rounded(value: float | None) -> float | None:
    """Rounds away the last digits, which squaring and taking the root may change."""
    return None if value is None else float(f"{value:.9g}")


def _describe(
    kind: str, architecture: Architecture, config: DecoderConfig, max_length: int | None
) -> dict[str, Any]:
    """Returns the config.json of an architecture with the decoder's sizes, and with its options where they exist."""
    d, mechanisms = config.dimensions, config.mechanisms
    rotates = [not isinstance(m, SoftmaxConfig) or m.rotary_dim != 0 for m in mechanisms]
    # Layers with positions first: they give the rotary fields.
    ordered = sorted(mechanisms, key=lambda m: isinstance(m, SoftmaxConfig) and m.rotary_dim == 0)
    full = next((m for m in ordered if isinstance(m, FullConfig)), None)
    local = next((m for m in ordered if isinstance(m, LocalConfig)), None)
    linear = next((m for m in mechanisms if isinstance(m, GatedDeltaNetConfig)), GatedDeltaNetConfig())
    either = full or local or FullConfig()
    types = [
        next((name for kind, name in LAYER_TYPES.items() if isinstance(m, kind)), "full_attention")
        for m in mechanisms
    ]
    sizes = dict(zip(LINEAR_SIZES, (*linear.sizes(d), linear.conv_size)))
    options: dict[str, Any] = {
        "num_key_value_heads": d.num_kv_heads,
        "head_dim": d.head_dim,
        architecture.activation: {ours: theirs for theirs, ours in ACTIVATIONS.items()}.get(d.ffn),
        "rms_norm_eps": d.norm_epsilon,
        "tie_word_embeddings": config.tied_embeddings,
        "attention_bias": d.use_bias,
        "mlp_bias": d.ffn_bias,
        "query_pre_attn_scalar": _rounded((either.scale or d.head_dim**-0.5) ** -2),
        "attn_logit_softcapping": either.logits_soft_cap,
        "final_logit_softcapping": config.final_soft_cap,
        "sliding_window": None if local is None else local.window,
        "use_sliding_window": local is not None,
        "max_window_layers": types.count("full_attention"),
        "layer_types": types,
        "partial_rotary_factor": rotary_factor(either.rotary_dim or d.head_dim, d.head_dim),
        "no_rope_layers": [int(is_rotated) for is_rotated in rotates],
        "linear_allow_neg_eigval": linear.negative_eigenvalues,
        **sizes,
        **EXPERTS,
        "num_experts": 0,
    }
    scalar = options["query_pre_attn_scalar"]
    if scalar is not None and scalar.is_integer():
        options["query_pre_attn_scalar"] = int(scalar)  # transformers requires an integer
    return {
        "architectures": [architecture.class_name],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": d.d_model,
        "intermediate_size": d.d_ff,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": d.num_heads,
        "max_position_embeddings": longest(either) if max_length is None else max_length,
        **{name: value for name, value in options.items() if name in architecture.defaults},
        **rotation_fields(architecture, d.rope_theta, full, local),
    }
