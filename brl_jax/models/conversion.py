"""Gives a trained decoder other mechanisms: takes over its parameters, and compares layer by layer.

    config = dataclasses.replace(teacher_config, mechanism=BRLConfig(window=128))
    params = converted(config, DecoderLM(config).init(key, tokens)["params"], teacher_config, teacher_params)
    errors = matching_errors(config, params, teacher_config, teacher_params, tokens)  # of each layer, to be minimised

docs/converting.md has the recipe.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array, Float, Int

from brl_jax.layers.core.protocol import Mechanism
from brl_jax.models.config import StackConfig
from brl_jax.models.decoder import DecoderConfig, DecoderLM
from brl_jax.models.stack import LayerPlace, carrier_keys, group_layers, layer_places

_TOP = "stack"
# Where a mechanism that contains softmax attention has its projections (BRL).
_PART = "local"


def check_converts(config: StackConfig, teacher: StackConfig) -> None:
    """Raises ValueError unless the layers of `config` fit into the blocks of a trained network."""
    if config.num_layers != teacher.num_layers:
        raise ValueError(f"num_layers must be {teacher.num_layers}, as trained, got {config.num_layers}")
    for new, old in zip(config.mechanisms, teacher.mechanisms):
        for mechanism in (new, old):
            if mechanism.network is not None:
                raise ValueError(
                    f"mechanism {mechanism.name} arranges its own layers, and cannot be converted"
                )
        if new.residual != old.residual:
            raise ValueError(
                f"mechanism {new.name} cannot replace {old.name}: their blocks have norms and a "
                f"feed-forward network at other places ({new.residual!r} and {old.residual!r})"
            )


def check_matches(config: StackConfig, teacher: StackConfig) -> None:
    """Raises ValueError unless `matching_errors` can compare the layers of the two networks."""
    check_converts(config, teacher)
    for mechanism in (*config.mechanisms, *teacher.mechanisms):
        if mechanism.segment is not None:
            raise ValueError(
                f"mechanism {mechanism.name} reads the network's outputs (memory='output'), so that its "
                "layers cannot be matched one by one"
            )


def replaced_layers(config: StackConfig, teacher: StackConfig) -> tuple[bool, ...]:
    """Returns for each layer whether its mechanism is another than the trained network's."""
    return tuple(new != old for new, old in zip(config.mechanisms, teacher.mechanisms))


def mixers(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the part of a decoder's parameters that belongs to its mechanisms."""
    flat = traverse_util.flatten_dict(dict(params))
    return traverse_util.unflatten_dict({path: leaf for path, leaf in flat.items() if _is_mechanisms(path)})


def with_mixers(params: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a decoder's parameters, with `own` (from `mixers`) for its mechanisms."""
    flat = traverse_util.flatten_dict(dict(params)) | traverse_util.flatten_dict(dict(own))
    return traverse_util.unflatten_dict(flat)


def _is_mechanisms(path: Sequence[str]) -> bool:
    return path[0] == _TOP and (path[1].startswith("carrier_") or "mixer" in path)


def converted(
    config: DecoderConfig,
    params: Mapping[str, Any],
    teacher_config: DecoderConfig,
    teacher: Mapping[str, Any],
) -> dict[str, Any]:
    """Returns the parameters of a network after a trained one has given it all that fits.

    Norms, feed-forward networks and tables are taken over, and of each mechanism what has the same name and shape: the
    projections of queries, keys, values and outputs, as a rule. The rest stays as it is: compressed tokens, gates,
    short convolutions.

    Args:
      config: like `teacher_config`, with other mechanisms.
      params: unboxed, of `config`, freshly initialised; or some of them (`mixers`).
      teacher_config, teacher: the trained network and its parameters.

    Raises:
      ValueError: a block has no place for its new mechanism.
    """
    check_converts(config, teacher_config)
    theirs = traverse_util.flatten_dict(dict(teacher))
    froms = layer_places(teacher_config.mechanisms)
    source: dict[tuple[str, str], list[LayerPlace]] = {}
    for ours, place in zip(layer_places(config.mechanisms), froms):
        source.setdefault(ours[:2], []).append(place)  # in the order of the repeats

    def taken(path: tuple[str, ...], leaf: Array) -> Array:
        if path[0] != _TOP or path[1] == "final_norm":
            return theirs.get(path, leaf)
        places = source.get((path[1], path[2]))
        if places is None:  # a carrier's
            return leaf
        inside = path[3:]
        if inside[:2] == ("mixer", _PART):
            inside = ("mixer", *inside[2:])
        found = [theirs.get((_TOP, group, block, *inside)) for group, block, _ in places]
        if any(each is None or each.shape[1:] != leaf.shape[1:] for each in found):
            return leaf
        if places == [(*places[0][:2], i) for i in range(len(found[0]))]:
            return found[0]
        return jnp.stack([each[repeat] for each, (*_, repeat) in zip(found, places)])

    flat = traverse_util.flatten_dict(dict(params))
    return traverse_util.unflatten_dict({path: taken(path, leaf) for path, leaf in flat.items()})


def matching_errors(
    config: DecoderConfig,
    params: Mapping[str, Any],
    teacher_config: DecoderConfig,
    teacher: Mapping[str, Any],
    tokens: Int[Array, "B T"],
    weights: Float[Array, "B T"] | None = None,
    *,
    positions: Int[Array, "#B T"] | None = None,
    segment_ids: Int[Array, "B T"] | None = None,
    deterministic: bool = True,
    rngs: dict[str, Array] | None = None,
) -> Float[Array, " L"]:
    """Returns for each layer how far its mechanism is from the trained network's, both on the hidden states of the
    trained network: the squared differences of the outputs, divided by the variance of the trained one's.

    No gradient flows into the trained network. 0 is equal; 1 is what the mean output of the tokens would have.

    Args:
      config, params: the network, and its parameters or their `mixers`, unboxed.
      teacher_config, teacher: the trained network and its parameters.
      tokens: read by the trained network, in one pass through all layers.
      weights: of the tokens; all 1 by default.
      positions, segment_ids: as for `DecoderLM`.
      deterministic, rngs: of the new mechanisms.

    Raises:
      ValueError: the layers cannot be compared (`check_matches`).
    """
    check_matches(config, teacher_config)
    calls: dict[str, Any] = {"positions": positions, "segment_ids": segment_ids}
    seen = jax.lax.stop_gradient(_mixed(teacher_config, teacher, tokens, calls))
    weights = jnp.ones(tokens.shape, jnp.float32) if weights is None else weights
    d = config.dimensions
    stack = params[_TOP]
    keys = carrier_keys(config.mechanisms)
    carries = {}
    for mechanism, key in keys.items():
        carrier = mechanism.carrier(d, parent=None)
        if carrier is not None:
            carries[key] = carrier.apply({"params": stack[key]}, seen[0][0], None)

    def layer(mechanism: Mechanism, own: Any, carries: Any, read: Array, target: Array) -> tuple[Any, Array]:
        key = keys[mechanism]
        results: Any = mechanism.layer(d, parent=None).apply(
            {"params": own}, read, carry=carries.get(key), deterministic=deterministic, rngs=rngs, **calls
        )
        y, carry, _ = results
        return (carries | {key: carry} if key in carries else carries), _share(y, target, weights)

    errors, first = [], 0
    for i, (period, repeats) in enumerate(group_layers(config.mechanisms)):

        def step(carries, xs, period=period):
            own, pairs = xs
            found = []
            for j, (mechanism, pair) in enumerate(zip(period, pairs)):
                carries, error = layer(mechanism, own[f"block_{j}"]["mixer"], carries, *pair)
                found.append(error)
            return carries, jnp.stack(found)

        step = step if config.remat == "none" else jax.checkpoint(step)
        here = seen[first : first + len(period) * repeats]
        first += len(here)
        pairs = tuple(
            tuple(jnp.stack(each) for each in zip(*here[j :: len(period)])) for j in range(len(period))
        )
        carries, found = jax.lax.scan(step, carries, (stack[f"layers_{i}"], pairs))
        errors.append(found.ravel())
    return jnp.concatenate(errors)


def _share(y: Array, target: Array, weights: Float[Array, "B T"]) -> Float[Array, ""]:
    """The squared error of y over the variance of the target, each over all tokens by their weight."""
    y, target, weights = y.astype(jnp.float32), target.astype(jnp.float32), weights[..., None]
    mean = jnp.sum(target * weights, (0, 1), keepdims=True) / jnp.maximum(jnp.sum(weights), 1e-9)
    variance = jnp.sum(jnp.square(target - mean) * weights)
    return jnp.sum(jnp.square(y - target) * weights) / jnp.maximum(variance, 1e-30)


def _mixed(
    config: DecoderConfig, params: Mapping[str, Any], tokens: Array, calls: Mapping[str, Any]
) -> list[tuple[Array, Array]]:
    """Returns what each layer's mechanism reads and returns (B, T, D), in one pass through the network."""

    def keep(call: Callable[..., Any], args: Any, kwargs: Any, context: Any) -> Any:
        result = call(*args, **kwargs)
        if context.module.name == "mixer" and context.method_name == "__call__":
            context.module.sow("intermediates", "mixed", (args[0], result[0]))
        return result

    with nn.intercept_methods(keep):
        _, kept = DecoderLM(config).apply(
            {"params": params}, tokens, method="hidden", mutable=["intermediates"], **calls
        )
    layers = kept["intermediates"][_TOP]
    found = []
    for group, block, repeat in layer_places(config.mechanisms):
        ((read, mixed),) = layers[group][block]["mixer"]["mixed"]
        found.append((read[repeat], mixed[repeat]))
    return found
