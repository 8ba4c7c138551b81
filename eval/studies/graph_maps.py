"""What transformers on graphs attend to: python -m eval.graph_maps --workdir DIR [DIR ...] [--picture FILE.png].

Figure 12 of BRL-Attention (OpenReview Vpyg3fqXbl, appendix C) for runs on lists of tokens, figure 13 for runs on sets
of nodes, whose outputs are drawn in two dimensions by t-SNE, coloured by class. Grey lines are the strongest pairs of
the first layer's attention, one for each node; red lines are the pairs that BRL's compressed tokens connect, and black
points the compressed tokens, each at the weighted mean of the nodes that it reads. The network reads a sample of the
nodes as one set, because the maps of all pairs of 10,000 nodes would take gigabytes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from brl_jax.fields import MOST, Range
from brl_jax.models.graph import NodeClassifier, SetEncoder, first_present
from eval.harness.options import PictureOptions
from eval.harness.output import Measured, study
from eval.harness.pictures import panels
from eval.harness.runs import Run, open_run
from eval.studies.locality import layer_weights
from eval.studies.regularizer import summary
from train.cli.summary import mechanism_names
from train.data.graphs.poly_tokens import PolyTokens
from train.engine.errors import UserError
from train.tasks.graph import GRAPH, GraphData


@dataclasses.dataclass(frozen=True)
class GraphMapsOptions(PictureOptions):
    """What to draw."""

    workdir: tuple[str, ...] = ("runs/graph",)
    """Folders of runs of train.graph with attention, all with the same network and data; a row of the picture each."""
    nodes: Annotated[int, Range(4, MOST)] = 600
    """How many nodes to read: of the test split for lists of tokens, else of all labelled nodes."""
    seed: Annotated[int, Range(0, 2**32 - 1)] = 0
    """Chooses the nodes, and starts t-SNE."""


class LayerMaps(NamedTuple):
    """The attention of a layer, (B, N, T, T), and BRL's maps: compression (B, N, M, T) and propagation (B, N, T, M)."""

    local: np.ndarray
    compress: np.ndarray | None
    propagate: np.ndarray | None

    @property
    def score(self) -> np.ndarray | None:
        """The reconstructed regularizer score (B, N, T, T)."""
        if self.propagate is None or self.compress is None:
            return None
        return np.einsum("bntm,bnms->bnts", self.propagate, self.compress)


class Looked(NamedTuple):
    """What is drawn of a run: names of tokens, or the classes (n,) and outputs (n, D) of nodes."""

    title: str
    layers: Mapping[int, LayerMaps]
    names: tuple[str, ...]
    classes: np.ndarray | None
    outputs: np.ndarray | None


def set_maps(
    model: NodeClassifier, params: Any, features: Float[np.ndarray, "B T F"], present: Int[np.ndarray, "B T"]
) -> tuple[dict[int, LayerMaps], Float[np.ndarray, "B T D"]]:
    """The maps of every layer, with tokens in the order of the lists and 0 for absent ones, and the encoder's rows."""

    @jax.jit
    def run(params: Any, features: Array, present: Array) -> Any:
        places = jnp.zeros((len(features), 1), jnp.int32) if model.config.network == "nodes" else None
        _, found = model.apply(
            {"params": params}, features, present, places=places, mutable=["maps", "intermediates"],
            capture_intermediates=lambda module, _: isinstance(module, SetEncoder),
        )  # fmt: skip
        (outputs,) = found["intermediates"]["encoder"]["__call__"]
        named = {
            name: layer_weights(model.config, found["maps"]["encoder"], name)  # type: ignore[arg-type]
            for name in ("weights", "compress", "propagate")
        }
        order, _ = first_present(present.astype(bool))
        return {name: {i: x[0] for i, x in found.items()} for name, found in named.items()}, order, outputs

    named, order, outputs = jax.tree.map(np.asarray, run(params, jnp.asarray(features), jnp.asarray(present)))
    if not named["weights"]:
        raise UserError("--workdir: expected networks whose layers have attention matrices")
    back, exists = np.argsort(order, axis=1), present.astype(bool)

    def placed(x: np.ndarray | None, axes: Sequence[int]) -> np.ndarray | None:
        for axis in axes if x is not None else ():
            shape = [len(back), 1, 1, 1]
            shape[axis] = back.shape[1]
            x = np.take_along_axis(x, back.reshape(shape), axis=axis) * exists.reshape(shape)
        return x

    layers = {}
    for i, weights in named["weights"].items():
        local = placed(weights, (2, 3))
        assert local is not None
        compress, propagate = named["compress"].get(i), named["propagate"].get(i)
        layers[i] = LayerMaps(local, placed(compress, (3,)), placed(propagate, (2,)))
    return layers, outputs


def across_classes(weights: Float[np.ndarray, "n n"], classes: Int[np.ndarray, "n"]) -> float:
    """The share of the weights that connects nodes of different classes."""
    total = float(weights.sum())
    return float(weights[classes[:, None] != classes].sum()) / total if total else 0.0


def look(run: Run, options: GraphMapsOptions) -> Looked:
    """Reads a run's nodes."""
    config = run.config
    network = config.model.network
    if network not in ("tokens", "nodes"):
        raise UserError(
            f"--workdir: {config.loop.workdir} has a {network}; expected a network with attention"
        )
    data: GraphData = GRAPH.load(config, ("test",))
    graph, rng = data.graph, np.random.default_rng(options.seed)
    title = f"{Path(graph.name).stem}, {mechanism_names(config.model)}"
    if isinstance(data.source, PolyTokens):
        nodes = graph.splits["test"][0]
        chosen = rng.choice(nodes, min(options.nodes, len(nodes)), replace=False)
        features, present = data.source.rows(chosen)
        layers, _ = set_maps(run.model, run.params, features, present)
        names = tuple(data.source.names)
        return Looked(title, layers, (*names, *[""] * (features.shape[1] - len(names))), None, None)
    nodes, classes = (np.concatenate([split[i] for split in graph.splits.values()]) for i in (0, 1))
    if classes.ndim > 1:
        raise UserError("--workdir: expected nodes with one class each, got nodes with several")
    at = np.sort(rng.choice(len(nodes), min(options.nodes, len(nodes)), replace=False))
    kinds = (graph.target,) * len(at)
    model = NodeClassifier(dataclasses.replace(config.model, kinds=kinds))
    features = data.source.features[graph.target][nodes[at]][None]
    # The parameters of a kind are at its number; kinds after the target are not needed.
    params = dict(run.params)
    params["projection"] = {
        name: x[: graph.target + 1] if name in ("kernel", "bias") else x
        for name, x in params["projection"].items()
    }
    layers, outputs = set_maps(model, params, features, np.ones((1, len(at)), np.int32))
    return Looked(title, layers, (), classes[at], outputs[0])


def measures(found: Looked) -> list[dict[str, Any]]:
    """The JSON objects of the layers."""
    rows = []
    for i, maps in sorted(found.layers.items()):
        score = maps.score
        sums = maps.local.sum(-1)
        exist = float((sums > 0).mean())
        row: dict[str, Any] = {"layer": i, "local": float(sums.mean()) / exist}
        if score is not None:
            kept = summary(maps.local, score)
            row |= {
                "row_sum_absolute": kept["row_sum_absolute"] / exist,
                "beyond_window": kept["beyond_window"],
            }
        if found.classes is not None:
            row["across_classes_local"] = across_classes(maps.local[0].mean(0), found.classes)
            if score is not None:
                row["across_classes"] = across_classes(np.abs(score[0]).mean(0), found.classes)
        rows.append(row)
    return rows


def measure(options: GraphMapsOptions) -> Iterator[Measured]:
    """The JSON object of each run, and what its picture needs."""
    first: Looked | None = None
    for workdir in options.workdir:
        run = open_run([GRAPH], workdir, "best")
        found = look(run, options)
        first = first or found
        if (first.classes is None) != (found.classes is None):
            raise UserError(
                "--workdir: expected runs with the same network, got lists of tokens and sets of nodes"
            )
        result = {"workdir": workdir, "step": run.step, "network": run.config.model.network}
        if found.classes is not None:
            counts = np.bincount(found.classes) / len(found.classes)
            result["across_classes_of_all_pairs"] = float(1 - (counts**2).sum())
        yield Measured({**result, "layers": measures(found)}, (found, options.seed))


def draw(measured: Sequence[Measured]) -> Figure:
    """Figure 12 for runs on lists of tokens, figure 13 for runs on sets of nodes."""
    drawn = [each.example[0] for each in measured]
    return _draw_lists(drawn) if drawn[0].classes is None else _draw_sets(drawn, measured[0].example[1])


def _draw_lists(drawn: Sequence[Looked]) -> Figure:
    rows = max(len(found.layers) for found in drawn)
    figure, axs = panels(rows, len(drawn), (1.5 + 4.2 * len(drawn), 4.2 * rows), grid=None)
    shown = {
        (j, column): (found, (maps.local if maps.score is None else maps.local + maps.score).mean((0, 1)))
        for column, found in enumerate(drawn)
        for j, (_, maps) in enumerate(sorted(found.layers.items()))
    }
    top = max(float(np.abs(values).max()) for _, values in shown.values())
    for place, (found, values) in shown.items():
        axes = axs[place]
        image = axes.imshow(values, cmap="RdBu_r", vmin=-top, vmax=top, interpolation="nearest")
        axes.set_title(f"{found.title}, layer {place[0] + 1}", fontsize=10)
        axes.set_xticks(range(len(found.names)), found.names, rotation=90, fontsize=7)
        axes.set_yticks(range(len(found.names)), found.names, fontsize=7)
    figure.colorbar(image, ax=list(axs.ravel()), label="mean weight", shrink=0.6)
    return figure


def _draw_sets(drawn: Sequence[Looked], seed: int) -> Figure:
    try:
        from sklearn.manifold import TSNE
    except ModuleNotFoundError as error:
        raise UserError("--picture needs scikit-learn: pip install -e '.[graph]'") from error
    figure, [axs] = panels(1, len(drawn), (4.8 * len(drawn), 4.8), grid=None)
    for axes, found in zip(axs, drawn):
        assert found.outputs is not None
        assert found.classes is not None
        maps = found.layers[min(found.layers)]
        middles = np.zeros((0, found.outputs.shape[1]), np.float32)
        if maps.compress is not None:
            weights = np.abs(maps.compress[0]).mean(0)
            middles = weights / np.maximum(weights.sum(-1, keepdims=True), 1e-30) @ found.outputs
        points = np.concatenate([found.outputs, middles])
        perplexity = min(30.0, (len(points) - 1) / 3)
        points = TSNE(perplexity=perplexity, init="pca", random_state=seed).fit_transform(points)
        places, centres = points[: len(found.outputs)], points[len(found.outputs) :]
        _lines(axes, places, maps.local[0].mean(0), "0.6")
        if maps.score is not None:
            _lines(axes, places, np.abs(maps.score[0]).mean(0), "#B2182B")
        axes.scatter(*places.T, c=found.classes, cmap="tab10", vmin=0, vmax=9, s=6, zorder=2)
        axes.scatter(*centres.T, c="black", s=14, zorder=3)
        axes.set_title(found.title, fontsize=10)
        axes.set_xticks([])
        axes.set_yticks([])
    return figure


def _lines(axes: Axes, places: np.ndarray, weights: np.ndarray, colour: str) -> None:
    """Draws a line from each node to the other node with the largest weight."""
    others = weights * (1 - np.eye(len(weights)))
    best = others.argmax(1)
    for start, end in zip(places, places[best]):
        axes.plot(*zip(start, end), color=colour, linewidth=0.3, alpha=0.6, zorder=1)


main = study(GraphMapsOptions(), "eval.graph_maps", "What transformers on graphs attend to.", measure, draw)
