"""Rotary positions in a config.json of transformers 4 or 5."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from brl_jax.attention.core.rotary import RopeScaling
from brl_jax.fields import Count, Positive, check_value
from brl_jax.layers.core.attention_layer import SoftmaxConfig
from brl_jax.models.huggingface.architectures import Architecture

ROPE_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "rope_theta": Positive,
        "rope_local_base_freq": Positive,
        "rope_scaling": Mapping[str, Any] | None,
        "rope_parameters": Mapping[str, Any] | None,
    }
)
_SCALING_FIELDS: Mapping[str, Any] = MappingProxyType(
    {
        "rope_type": str | None,
        "type": str | None,
        "rope_theta": Positive,
        "factor": Positive,
        "original_max_position_embeddings": Count,
        "truncate": bool,
        **dict.fromkeys(("low_freq_factor", "high_freq_factor"), Positive),
        **dict.fromkeys(
            ("beta_fast", "beta_slow", "attention_factor", "partial_rotary_factor"), Positive | None
        ),
        **dict.fromkeys(("full_attention", "sliding_attention"), Mapping[str, Any] | None),
    }
)
_FIELDS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
    "yarn": (
        "factor",
        "original_max_position_embeddings",
        "beta_fast",
        "beta_slow",
        "attention_factor",
        "truncate",
    ),
}


def check_fields(fields: Mapping[str, Any], values: Mapping[str, Any]) -> None:
    """Raises ValueError if a value of config.json does not fit its field's annotation."""
    for name, value in values.items():
        check_value(f"config.json: {name}", value, fields.get(name, Any))


def layer_rotation(
    values: Mapping[str, Any], architecture: Architecture, kind: str
) -> tuple[float | None, RopeScaling]:
    """Returns the base of the frequencies and their scaling in layers of a kind, "full" or "sliding". A base of None
    means no positions.

    Raises:
      ValueError: the scaling has no equivalent here.
    """
    parameters = _parameters(values, architecture, kind)
    if architecture.rope_optional and parameters.get("rope_theta", values.get("rope_theta", 0)) is None:
        return None, RopeScaling()
    check_fields(_SCALING_FIELDS, parameters)
    theta = values.get("rope_theta", architecture.rope_theta)
    if architecture.rope_by_layer and kind == "sliding":
        theta = values.get("rope_local_base_freq", architecture.defaults.get("rope_local_base_freq", theta))
    if "partial_rotary_factor" in architecture.defaults:
        # See `rotary_dim`. Text has the same position on each of the axes that mrope tells apart.
        for name in ("partial_rotary_factor", "mrope_section", "mrope_interleaved"):
            parameters.pop(name, None)
    return float(parameters.pop("rope_theta", theta)), _scaling(
        parameters, values.get("max_position_embeddings")
    )


def _parameters(values: Mapping[str, Any], architecture: Architecture, kind: str) -> dict[str, Any]:
    """Returns the rotary fields of a kind of layers. As in transformers, rope_scaling replaces rope_parameters, or is
    added to those of full attention if each kind has its own."""
    new, old = values.get("rope_parameters") or {}, values.get("rope_scaling") or {}
    if not architecture.rope_by_layer:
        return dict(old or new)
    check_fields(_SCALING_FIELDS, new)
    return {**(new.get(f"{kind}_attention") or {}), **(old if kind == "full" else {})}


def rotary_dim(values: Mapping[str, Any], architecture: Architecture, head_dim: int) -> int:
    """Returns how many features of a head are rotated, in an architecture that rotates some of them (default: a
    quarter).

    Raises:
      ValueError: the number of features is odd or out of range.
    """
    factor = _parameters(values, architecture, "full").get("partial_rotary_factor")
    if factor is None:
        factor = values.get("partial_rotary_factor", architecture.defaults["partial_rotary_factor"])
    size = int(head_dim * factor)
    if size < 2 or size % 2 or size > head_dim:
        raise ValueError(
            f"config.json: partial_rotary_factor must give an even number of the {head_dim} features of a head, got "
            f"{factor!r}"
        )
    return size


def rotary_factor(size: int, head_dim: int) -> float:
    """Returns the partial_rotary_factor that `rotary_dim` turns into `size` features."""
    factor = size / head_dim
    return factor if int(head_dim * factor) == size else math.nextafter(factor, 1.0)


def _scaling(parameters: dict[str, Any], longest: int | None) -> RopeScaling:
    kind = parameters.pop("rope_type", parameters.pop("type", "default"))
    parameters.pop("type", None)
    if kind not in _FIELDS:
        raise ValueError(f"config.json: rope_type must be one of {', '.join(_FIELDS)}, got {kind!r}")
    if parameters.get("partial_rotary_factor") == 1.0:
        del parameters["partial_rotary_factor"]
    for name, value in parameters.items():
        if name not in _FIELDS[kind] and kind != "default" and value is not None:
            raise ValueError(
                f"config.json: {name}={value!r} is not supported for rope_type {kind}; supported are "
                f"{', '.join(_FIELDS[kind])}"
            )
    if kind == "default":
        if parameters.get("partial_rotary_factor") is not None:
            raise ValueError(
                f"config.json: partial_rotary_factor must be 1, got {parameters['partial_rotary_factor']!r}"
            )
        return RopeScaling()
    try:
        factor = float(parameters["factor"])
        if kind == "linear":
            return RopeScaling("linear", factor)
        if kind == "yarn" and longest is not None:
            parameters.setdefault("original_max_position_embeddings", longest)
        length = parameters["original_max_position_embeddings"]
        if kind == "llama3":
            slow, fast = parameters["low_freq_factor"], parameters["high_freq_factor"]
            return RopeScaling("llama3", factor, length, float(slow), float(fast))
    except KeyError as error:
        raise ValueError(f"config.json: rope_type {kind} needs the field {error.args[0]}") from error
    slow, fast = parameters.get("beta_slow") or 1.0, parameters.get("beta_fast") or 32.0
    multiplier = parameters.get("attention_factor")
    if multiplier is None:
        multiplier = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    truncate = parameters.get("truncate", True)
    return RopeScaling("yarn", factor, length, float(slow), float(fast), float(multiplier), truncate)


def longest(mechanism: SoftmaxConfig) -> int:
    """Returns the number of tokens that a mechanism's rotary frequencies are scaled for, or 8,192."""
    scaling = mechanism.rope_scaling
    scaled = scaling.kind in ("llama3", "yarn")
    return round(scaling.factor * scaling.original_length) if scaled else 8192


def rotation_fields(
    architecture: Architecture, theta: float | None, full: SoftmaxConfig | None, local: SoftmaxConfig | None
) -> dict[str, Any]:
    """Returns the rotary fields of config.json from a layer of each kind, or None for a kind that the network lacks.
    They have the form of transformers 4, which transformers 5 also reads."""
    main = full or local or SoftmaxConfig()
    if architecture.rope_optional and (theta is None or main.rotary_dim == 0):
        return {"rope_parameters": {"rope_theta": None, "rope_type": "default"}}
    theta = theta or 1e4

    def scaled(mechanism: SoftmaxConfig) -> dict[str, Any]:
        scaling = mechanism.rope_scaling
        if scaling.kind == "none":
            return {}
        values: dict[str, Any] = {"rope_type": scaling.kind, "factor": scaling.factor}
        if scaling.kind != "linear":
            values["original_max_position_embeddings"] = scaling.original_length
        if scaling.kind == "llama3":
            values |= {"low_freq_factor": scaling.slow_turns, "high_freq_factor": scaling.fast_turns}
        if scaling.kind == "yarn":
            values |= {
                "beta_slow": scaling.slow_turns,
                "beta_fast": scaling.fast_turns,
                "attention_factor": scaling.query_key_factor,
            } | ({} if scaling.truncate else {"truncate": False})
        return values

    fields: dict[str, Any] = {"rope_theta": main.rope_theta or theta}
    if scaled(main):
        fields["rope_scaling"] = scaled(main)
    if "rope_local_base_freq" in architecture.defaults:
        return fields if local is None else fields | {"rope_local_base_freq": local.rope_theta or theta}
    if architecture.rope_by_layer:  # transformers 5 would give sliding layers the architecture's base
        kinds = {"full_attention": full or main, "sliding_attention": local or main}
        fields["rope_parameters"] = {
            kind: {"rope_type": "default", "rope_theta": m.rope_theta or theta, **scaled(m)}
            for kind, m in kinds.items()
        }
    return fields
