"""How local a trained model's attention is: python -m eval.locality --workdir DIR [DIR ...].

The locally accumulated attention score of TransNormer (arXiv:2210.10340, section 3.2). With p_ij the attention of
position i to position j (eq. 4), a neighbourhood of r N positions around i and a sequence of N,

    l(i, r, N) = p_i,start + ... + p_i,end,     end = start + w - 1,  w = max(1, round(r N)),
    start = i - floor(w / 2), moved as little as needed for all w positions to lie in the sequence,

so that l(i, 1, N) = 1, averaged over positions, heads and sequences. If entries can be negative or a row does not sum
to 1, p_ij = |a_ij| / sum_k |a_ik|, with a the matrix by which values become outputs (`sow_weights` of the layers). For
BRL it is the matrix of its local attention. `area` is the area under the score; 1 means that all attention is on the
neighbours.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from brl_jax.fields import Range, Rows
from brl_jax.models import DecoderConfig, DecoderLM
from brl_jax.models.stack import group_layers
from eval.harness.options import StudyOptions
from eval.harness.output import Measured, each_run, study
from eval.harness.pictures import legend_outside, line_styles
from eval.harness.runs import open_run, run_labels
from train.cli.summary import mechanism_names
from train.data.dataset import load
from train.engine.errors import UserError
from train.tasks.lm import LM

# Sizes of the neighbourhood, as shares of the sequence.
RATIOS = tuple(i / 20 for i in range(1, 21))


@dataclasses.dataclass(frozen=True)
class LocalityOptions(StudyOptions):
    """What to measure."""

    data: str | None = None
    """Read this text instead of the run's own, as for train.lm; the run's tokenizer encodes it."""
    length: Annotated[int, Range(2, 2**27)] = 256
    """Tokens of a sequence."""
    sequences: Rows = 16
    """Number of sequences, spaced evenly over the text."""


def locally_accumulated_score(
    weights: Float[Array, "*B N N"], ratios: Sequence[float]
) -> Float[Array, "*B N R"]:
    """l(i, r, N) of the module's text for each position i and ratio r; a row of zeros gives 0."""
    length = weights.shape[-1]
    share = jnp.abs(weights.astype(jnp.float32))
    total = share.sum(-1, keepdims=True)
    share = share / jnp.where(total > 0, total, 1.0)
    before = jnp.pad(jnp.cumsum(share, -1), [(0, 0)] * (share.ndim - 1) + [(1, 0)])
    size = np.maximum(1, np.floor(np.asarray(ratios) * length + 0.5).astype(np.int32))[None]
    start = np.clip(np.arange(length)[:, None] - size // 2, 0, length - size)
    first, last = (
        jnp.take_along_axis(before, jnp.asarray(x)[(None,) * (before.ndim - 2)], axis=-1)
        for x in (start, start + size)
    )
    return last - first


def uniform_score(length: int, ratios: Sequence[float]) -> np.ndarray:
    """The score of attention that a decoder spreads evenly over each token's past, averaged over positions."""
    even = jnp.tril(jnp.ones((length, length), jnp.float32))
    return np.asarray(locally_accumulated_score(even, ratios).mean(0))


def area(ratios: Sequence[float], score: Sequence[float]) -> float:
    """The area under score over rising ratios up to 1, starting at (0, 0)."""
    return float(np.trapezoid([0.0, *score], [0.0, *ratios]))


def sown_maps(model: DecoderLM, params: Any, tokens: Int[Array, "B T"]) -> Any:
    """What the layers of a decoder sow into "maps" (`brl_jax.layers.core.protocol`) for rows without a past."""
    _, sown = model.apply({"params": params}, tokens, method="hidden", mutable="maps")
    return sown.get("maps", {})


def layer_weights(config: DecoderConfig, maps: Any, name: str = "weights") -> dict[int, list[Array]]:
    """What each layer's mechanism (or both that share it) has sown into `maps` as `name`, by the layer's number.

    Each array of "weights" is (B, N, T, T).
    """
    found: dict[int, list[Array]] = {}
    first = 0
    for i, (period, repeats) in enumerate(group_layers(config.mechanisms)):
        for j in range(len(period)):
            block = maps.get("stack", {}).get(f"layers_{i}", {}).get(f"block_{j}", {})
            leaves = jax.tree_util.tree_flatten_with_path(block)[0]
            sown = [leaf for path, leaf in leaves if jax.tree_util.DictKey(name) in path]
            for repeat in range(repeats if sown else 0):
                found[first + repeat * len(period) + j] = [leaf[repeat] for leaf in sown]
        first += repeats * len(period)
    return found


def measure(
    model: DecoderLM, params: Any, tokens: Int[np.ndarray, "S N"], ratios: Sequence[float]
) -> dict[int, np.ndarray]:
    """The score of each layer that exposes its attention matrix, averaged over heads, positions and sequences."""

    @jax.jit
    def scores(params, row):
        found = layer_weights(model.config, sown_maps(model, params, row[None]))
        return {
            layer: jnp.stack([locally_accumulated_score(x, ratios).mean((0, 1, 2)) for x in weights]).mean(0)
            for layer, weights in found.items()
        }

    rows = [scores(params, jnp.asarray(row, jnp.int32)) for row in tokens]
    return jax.tree.map(lambda *leaves: np.mean(np.stack(leaves), axis=0), *rows)


def first_map(model: DecoderLM, params: Any, row: Int[np.ndarray, " N"]) -> Float[np.ndarray, "N N"]:
    """p of the first layer that exposes its attention matrix, for one sequence, averaged over the heads."""
    found = layer_weights(model.config, sown_maps(model, params, jnp.asarray(row, jnp.int32)[None]))
    weights = np.abs(np.asarray(found[min(found)][0][0]))
    return (weights / np.maximum(weights.sum(-1, keepdims=True), 1e-9)).mean(0)


def measure_run(options: LocalityOptions, workdir: str) -> Measured:
    """The JSON object of one run, and its `first_map`."""
    _, config, model, params, step = open_run([LM], workdir, options.checkpoint)
    mechanism = mechanism_names(config.model)
    longest = min((m.segment for m in config.model.mechanisms if m.segment is not None), default=None)
    if longest is not None and options.length > longest:
        raise UserError(
            f"--length: {workdir} takes {longest} tokens (its block_size) at once, got {options.length}"
        )
    data = config.data if options.data is None else dataclasses.replace(config.data, data=options.data)
    _, corpora = load(data, workdir, (options.split,))
    text = corpora[options.split].tokens
    if len(text) < options.length:
        raise UserError(f"--length: the text has {len(text)} tokens, got {options.length}")
    starts = np.linspace(0, len(text) - options.length, options.sequences).astype(np.int64)
    tokens = np.stack([text[start : start + options.length] for start in starts])
    layers = measure(model, params, tokens, RATIOS)
    if not layers:
        raise UserError(f"--workdir: the mechanism of {workdir}, {mechanism}, exposes no attention matrix")
    mean = np.mean(list(layers.values()), axis=0)
    result = {
        "workdir": workdir,
        "mechanism": mechanism,
        "step": step,
        "split": options.split,
        "length": options.length,
        "sequences": options.sequences,
        "ratios": list(RATIOS),
        "score": mean.tolist(),
        "area": area(RATIOS, mean.tolist()),
        "uniform_area": area(RATIOS, uniform_score(options.length, RATIOS).tolist()),
        "layers": [
            {"layer": layer, "score": score.tolist(), "area": area(RATIOS, score.tolist())}
            for layer, score in sorted(layers.items())
        ],
    }
    return Measured(result, None if options.picture is None else first_map(model, params, tokens[-1]))


def draw(measured: Sequence[Measured]) -> Figure:
    """The score over the size of the neighbourhood, one curve for each run, and its area in each layer; below, each
    run's first layer."""
    results = [each.result for each in measured]
    whole = Figure(figsize=(13, 10), layout="constrained")
    parts: Any = whole.subfigures(2, 1, height_ratios=(5, 4))
    top, bottom = parts
    curves, areas = top.subplots(1, 2, width_ratios=(3, 2))
    labels = run_labels(results)
    for axes, label, each in zip(bottom.subplots(1, len(measured), squeeze=False)[0], labels, measured):
        # Few weights are far above the others.
        axes.imshow(each.example, cmap="Greys", vmin=0, vmax=np.quantile(each.example, 0.99))
        axes.set(title=label, xlabel="token read", ylabel="token")
    styles = line_styles([result["workdir"] for result in results])
    for run, result in zip(labels, results, strict=True):
        label = f"{run}, area {result['area']:.2f}"
        style = {**styles[result["workdir"]], "markersize": 5}
        curves.plot(RATIOS, result["score"], label=label, **style)
        numbers = [layer["layer"] + 1 for layer in result["layers"]]
        areas.plot(numbers, [layer["area"] for layer in result["layers"]], label=label, **style)
    first = results[0]
    even = uniform_score(first["length"], RATIOS)
    name = f"evenly over the past, area {first['uniform_area']:.2f}"
    curves.plot(RATIOS, even, color="#999999", linestyle=":", label=name)
    areas.axhline(first["uniform_area"], color="#999999", linestyle=":", label=name)
    curves.set(
        xlabel="size of the neighbourhood r, share of the sequence",
        ylabel="share of attention inside, l(i, r, N)",
        title=f"locally accumulated attention score, N = {first['length']}",
        xlim=(0, 1),
        ylim=(0, 1.02),
    )
    areas.set(xlabel="layer", ylabel="area under the curve", title="by layer", ylim=(0, 1.02))
    areas.set_xticks(sorted({layer["layer"] + 1 for result in results for layer in result["layers"]}))
    for axes in (curves, areas):
        axes.grid(True, alpha=0.3)
    legend_outside(areas)
    return whole


main = study(
    LocalityOptions(),
    "eval.locality",
    "How local a trained model's attention is.",
    each_run(measure_run),
    draw,
)
