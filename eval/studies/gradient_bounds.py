"""Compares gradients by attention scores with their bounds: python -m eval.gradient_bounds --workdir DIR [DIR ...].

TransNormer (arXiv:2210.10340, section 3.1 and appendix D) bounds how strongly the loss L depends on the scores s_ij of
softmax attention (f = exp), linear attention (f the identity) and NormAttention. With p_ij = f(s_ij) / sum_k f(s_ik),
the outputs O, the values V, c_1 = max_i |dL / dO_i|, c_2 = max_j |V_j| and c_3 = min_ij |s_ij| of a row of n tokens:

    |dp_ij / ds_ik|  <=  1 / 4                          softmax        (9)
                         1 / (4 |s_ik|)                 linear         (11)
    |dL / ds_ij|     <=  sqrt(n) c_1 c_2 / 4            softmax        (59)
                         sqrt(n) c_1 c_2 / (4 c_3)      linear         (48)
                         3 c_1 c_2 d / (2 sqrt(eps))    NormAttention  (15)

In NormAttention d is the width of the merged heads, over which it normalises, O_i is the normalised row before the
learned scale, and c_1 covers all heads. Linear attention with rotary positions has no bound, because it rotates its
scores but not its denominator. `share_of_row_bound` replaces (15) by |dL / dO_i| |V_j| / sqrt(sigma_i^2 + eps): the
tighter bound with the norm of the matrix (52) and each row's mean square sigma_i^2.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from brl_jax.attention.core.implied_weights import implied_weights
from brl_jax.fields import Range, Rows
from brl_jax.layers import (
    DiagConfig,
    Dimensions,
    FullConfig,
    LinearConfig,
    LocalConfig,
    Mechanism,
    NormConfig,
)
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.protocol import MechanismLayer
from brl_jax.layers.core.side_by_side import SideBySideConfig
from brl_jax.models import DecoderLM
from eval.harness.options import StudyOptions
from eval.harness.output import Measured, each_run, study
from eval.harness.pictures import legend_outside, line_styles, panels
from eval.harness.runs import first_rows, open_run, run_labels
from eval.studies.locality import layer_weights
from train.cli.summary import mechanism_names
from train.engine.errors import UserError
from train.tasks.lm import LM

Kind = Literal["softmax", "linear", "norm"]

# A collection of variables that the scan over layers keeps apart by layer, and that nothing else here reads.
_COLLECTION = "intermediates"


@dataclasses.dataclass(frozen=True)
class BoundOptions(StudyOptions):
    """What to measure."""

    sequences: Rows = 4
    """Rows to read, the first of the split."""
    length: Annotated[int, Range(2, 2**27)] = 256
    """Tokens of a row, at most as in training."""


def kind_of(mechanism: Mechanism, dimensions: Dimensions) -> Kind | None:
    """Which bounds apply to a layer; None if the paper has none for it."""
    match mechanism:
        case FullConfig() | LocalConfig():
            return None if mechanism.sinks or mechanism.logits_soft_cap is not None else "softmax"
        case DiagConfig(score="softmax"):
            return "softmax"
        case LinearConfig(normalize=True):
            return "linear" if dimensions.rope_theta is None else None
        case NormConfig(norm="rms"):
            return "norm"
    return None


def kinds_of(mechanism: Mechanism, dimensions: Dimensions) -> list[Kind]:
    """The bounds of a layer, one for each of two mechanisms that share it; empty without bounds."""
    parts = mechanism.both.values() if isinstance(mechanism, SideBySideConfig) else (mechanism,)
    return [kind for part in parts if (kind := kind_of(part, dimensions)) is not None]


class LayerGradients(NamedTuple):
    """The scores of one layer, and the gradients of the loss with respect to them.

    Attributes:
      weights: (B, N, T, T), p_ij; for NormAttention the scores.
      scores: (B, N, T, T), s_ij; for softmax attention the logarithms of the weights, -inf for unseen pairs.
      value: (B, T, N, V).
      mean_square: (B, T), of the rows that NormAttention normalises; 0 for the other kinds.
      by_score: (B, N, T, T), dL / ds_ij.
      by_output: (B, T, N, V), dL / dO_i.
    """

    weights: Float[np.ndarray, "B N T T"]
    scores: Float[np.ndarray, "B N T T"]
    value: Float[np.ndarray, "B T N V"]
    mean_square: Float[np.ndarray, "B T"]
    by_score: Float[np.ndarray, "B N T T"]
    by_output: Float[np.ndarray, "B T N V"]


def _explicit(run: Any, args: Any, kwargs: Any, context: nn.module.InterceptorContext) -> Any:
    """Replaces a layer's attention function by attention through its matrix of scores. Adds the variable "moved_scores"
    to the scores and "moved_output" to the outputs, and puts both sums' terms into `_COLLECTION`."""
    module = context.module
    kind = kind_of(module.mechanism, module.dimensions) if isinstance(module, MechanismLayer) else None
    if kind is None or context.method_name != "attention":
        return run(*args, **kwargs)

    def moved(name: str, like: Array) -> Array:
        return like + module.variable(_COLLECTION, name, jnp.zeros_like, like).value

    def weighted(scores: Array, weights: Array, value: Array, norm: Mapping[str, Any] | None = None) -> Array:
        repeated = jnp.repeat(value, weights.shape[1] // value.shape[2], axis=2)
        out = jnp.einsum("bnts,bsnh->btnh", weights, repeated)
        mean_square: Array = jnp.zeros(out.shape[:2], out.dtype)
        if norm is not None:
            mean_square = jnp.mean(jnp.square(out), axis=(2, 3))
            out = out * jax.lax.rsqrt(mean_square + norm["epsilon"])[:, :, None, None]
        out = moved("moved_output", out)
        for name, array in zip(LayerGradients._fields, (weights, scores, repeated, mean_square)):
            module.put_variable(_COLLECTION, name, array)
        if norm is not None:
            out = out * norm["norm_scale"].astype(out.dtype)[None, None]
        return out.astype(value.dtype)

    attention: Attention = run(*args, **kwargs)
    function: Any = attention.function
    products: Any = attention.linear_part or function
    if kind == "linear":
        products = functools.partial(products, normalize=False)

    def explicit(query: Array, key: Array, value: Array, **options: Any) -> Array:
        scores = implied_weights(lambda value: products(query, key, value, **options), value)
        if kind == "softmax":
            seen = scores > 0
            # The logarithm of 0 has no gradient.
            scores = jnp.log(jnp.where(seen, scores, 1.0))
            scores = jnp.where(seen, moved("moved_scores", scores), -jnp.inf)
            return weighted(scores, jax.nn.softmax(scores, axis=-1), value)
        seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        scores = jnp.where(seen, moved("moved_scores", scores), 0.0)
        weights = scores / scores.sum(-1, keepdims=True) if kind == "linear" else scores
        return weighted(scores, weights, value, function.keywords if kind == "norm" else None)

    return attention._replace(function=explicit)


def layer_gradients(
    model: DecoderLM, params: Any, tokens: Int[np.ndarray, "B T"], targets: Int[np.ndarray, "B T"]
) -> dict[int, list[LayerGradients]]:
    """The gradients of the mean loss of each row in each layer that `kind_of` knows; two in a layer that two mechanisms
    share."""
    rows = tuple(jnp.asarray(array) for array in (tokens, targets, np.ones(tokens.shape, np.float32)))

    def loss(variables: Any) -> tuple[Array, Any]:
        with nn.intercept_methods(_explicit):
            (nll, *_), found = model.apply(variables, *rows, method="loss", mutable=[_COLLECTION])
        return nll / tokens.shape[1], found.get(_COLLECTION, {})

    shapes = jax.eval_shape(lambda params: loss({"params": params})[1], params)

    def unmoved(tree: Any) -> Any:
        parts = {name: unmoved(part) for name, part in tree.items() if isinstance(part, dict)}
        added = {name: part for name, part in tree.items() if name.startswith("moved_")}
        return parts | {name: jnp.zeros(part.shape, part.dtype) for name, part in added.items()}

    moved = unmoved(shapes)

    @jax.jit
    def gradients(params: Any, moved: Any) -> tuple[Any, Any]:
        return jax.grad(lambda moved: loss({"params": params, _COLLECTION: moved}), has_aux=True)(moved)

    by, found = gradients(params, moved)
    parts = [
        *(layer_weights(model.config, found, name) for name in LayerGradients._fields[:4]),
        *(layer_weights(model.config, by, name) for name in ("moved_scores", "moved_output")),
    ]
    return {
        layer: [LayerGradients(*map(np.asarray, arrays)) for arrays in zip(*(part[layer] for part in parts))]
        for layer in parts[0]
    }


def summary(kind: Kind, g: LayerGradients, epsilon: float) -> tuple[dict[str, Any], Float[np.ndarray, " P"]]:
    """The measures of the module's text, and |dL / ds_ij| / (c_1 c_2) of every pair that a token sees. NormAttention's
    norm adds `epsilon` to the mean square."""
    weights, scores, value, mean_square, by_score, by_output = (x.astype(np.float64) for x in g)
    length = weights.shape[-1]
    seen = np.tril(np.ones((length, length), bool)) & (np.isfinite(scores) if kind == "softmax" else True)
    seen = np.broadcast_to(seen, weights.shape)
    of_values = np.linalg.norm(value, axis=-1).transpose(0, 2, 1)  # (B, N, T)
    squares = np.square(by_output).sum(-1)  # (B, T, N)
    if kind == "norm":
        squares = np.broadcast_to(squares.sum(-1, keepdims=True), squares.shape)
    of_outputs = np.sqrt(squares).transpose(0, 2, 1)
    unit = (of_outputs.max(-1) * of_values.max(-1))[..., None, None]  # c_1 c_2
    size = np.abs(by_score) / unit
    least = np.where(seen, np.abs(scores), np.inf).min((-2, -1), keepdims=True)  # c_3
    entry = entry_bound = entry_share = None
    with np.errstate(divide="ignore"):
        match kind:
            case "softmax":
                bound = np.full_like(unit, math.sqrt(length) / 4)
                entry, entry_bound = weights * (1 - weights), np.full_like(weights, 0.25)
                entry_share = entry / entry_bound
            case "linear":
                bound = math.sqrt(length) / (4 * least)
                entry = np.abs((1 - weights) / scores.sum(-1, keepdims=True))
                entry_bound = 1 / (4 * np.abs(scores))
                entry_share = entry / entry_bound
            case "norm":
                bound = np.full_like(unit, 1.5 * value.shape[2] * value.shape[3] / np.sqrt(epsilon))
    relative = size if kind == "softmax" else size * np.abs(scores)
    measures = {
        "kind": kind,
        "largest": float(size[seen].max()),
        "median": float(np.median(size[seen])),
        "bound": float(bound.min()),
        "share_of_bound": float((size / bound)[seen].max()),
        "relative": float(relative[seen].max()),
        "entry": None if entry is None else float(entry[seen].max()),
        "entry_bound": None if entry_bound is None else float(entry_bound[seen].max()),
        "entry_share": None if entry_share is None else float(entry_share[seen].max()),
    }
    if kind == "linear":
        measures["smallest_score"] = float(least.min())
    if kind == "norm":
        row = (of_outputs / np.sqrt(mean_square + epsilon)[:, None])[..., None] * of_values[..., None, :]
        measures["share_of_row_bound"] = float((np.abs(by_score) / row)[seen].max())
    return measures, size[seen]


def measure_run(options: BoundOptions, workdir: str) -> Measured:
    """The JSON object of one run, and for the picture the sizes of the gradients of all pairs."""
    run = open_run([LM], workdir, options.checkpoint)
    config = run.config.model
    kinds = [kinds_of(mechanism, config.dimensions) for mechanism in config.mechanisms]
    name = mechanism_names(config)
    if not any(kinds):
        raise UserError(
            f"--workdir: {workdir} ({name}) has no layer of softmax attention, of linear attention without rotary "
            "positions (--rope_theta None), or of NormAttention with a root mean square"
        )
    rows = first_rows(run, options.split, options.sequences)
    tokens, targets = (rows[part][:, : options.length] for part in ("tokens", "targets"))
    found = layer_gradients(run.model, run.params, tokens, targets)
    layers, sizes = [], []
    for layer, parts in sorted(found.items()):
        for kind, part in zip(kinds[layer], parts, strict=True):
            measures, size = summary(kind, part, config.norm_epsilon)
            layers.append({"layer": layer, **measures})
            sizes.append(size)
    result = {
        "workdir": workdir,
        "mechanism": name,
        "step": run.step,
        "length": int(tokens.shape[1]),
        "sequences": len(tokens),
        "layers": layers,
    }
    return Measured(result, np.concatenate(sizes))


def draw(measured: list[Measured]) -> Figure:
    """How the gradients are distributed over the pairs, with their bounds, and both in each layer."""
    figure, [[shares, by_layer]] = panels(1, 2, (13, 5))
    results = [each.result for each in measured]
    labels = run_labels(results)
    styles = line_styles(labels)
    places = np.concatenate([np.linspace(0, 0.99, 100), 1 - np.geomspace(0.01, 1e-6, 60)])
    for name, (result, sizes) in zip(labels, measured, strict=True):
        layers = result["layers"]
        style = styles[name]
        line = {"color": style["color"], "linestyle": style["linestyle"]}
        shares.plot(np.quantile(sizes, places), 1 - places, label=name, **line)
        shares.axvline(min(layer["bound"] for layer in layers), **line, alpha=0.5)
        numbers = [layer["layer"] + 1 for layer in layers]
        by_layer.plot(numbers, [layer["largest"] for layer in layers], label=f"{name}, largest", **style)
        dotted = {**style, "linestyle": ":", "fillstyle": "none"}
        by_layer.plot(numbers, [layer["bound"] for layer in layers], label=f"{name}, bound", **dotted)
    size = "|dL / ds| / (c1 c2)"
    title = "all pairs; vertical: the smallest bound"
    shares.set(xscale="log", yscale="log", xlabel=size, ylabel="share of pairs above", title=title)
    shares.set_xlim(left=1e-8)
    by_layer.set(yscale="log", xlabel="layer", ylabel=size, title="the largest, and its bound")
    by_layer.set_xticks(sorted({layer["layer"] + 1 for result in results for layer in result["layers"]}))
    legend_outside(by_layer)
    return figure


main = study(
    BoundOptions(),
    "eval.gradient_bounds",
    "Gradients by attention scores and their bounds.",
    each_run(measure_run),
    draw,
)
