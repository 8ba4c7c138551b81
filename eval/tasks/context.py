"""Where a language model's context pays: python -m eval.context --workdir DIR [DIR ...] [--picture FILE.png].

The held-out text is read twice, with the memory carried from row to row and with an empty memory at the start of each
row. The losses of the targets are averaged over all of them, by the position in the block, and by the distance
from the token that predicts a target to the target's last occurrence before it: within reach of the layers' windows, in
the history that BRL's compressed tokens of one layer read, beyond, or new. Several runs are measured by the same
boundaries: the shortest reach, the longest history and the shortest block among them, unless options set them.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.fields import Count, Natural
from brl_jax.layers import BRLConfig, LocalConfig, Mechanism
from brl_jax.layers.core.side_by_side import SideBySideConfig
from brl_jax.models import DecoderConfig, DecoderLM
from eval.harness.options import StudyOptions, command
from eval.harness.output import picture_path
from eval.harness.pictures import line_styles, panels, plain_log_axis, save, shared_legend
from eval.harness.runs import Run, open_run, run_labels
from eval.harness.table import Table
from eval.tasks.lm import reading
from train.cli.summary import mechanism_names
from train.data.corpus import Corpus
from train.engine.errors import UserError
from train.tasks.lm import LM, held_out_stream
from train.tasks.lm_config import LmConfig

# Parts that a block is cut into for the loss by position.
_PARTS = 16
_LOSSES = ("carried", "cleared")


@dataclasses.dataclass(frozen=True)
class ContextOptions(StudyOptions):
    """What to measure."""

    data: str | None = None
    """Read this text instead of the run's own, as for train.lm; the run's tokenizer encodes it."""
    tokens: Natural = 100_000
    """Tokens of the text to read; 0: all."""
    ngram: Count = 1
    """Tokens that must have occurred together; 1: the target alone."""
    reach: Natural | None = None
    """Tokens that a prediction sees without memory; None: by the runs' windows and layers."""
    history: Count | None = None
    """Tokens back from a prediction to the farthest that compressed tokens read; None: by the runs' blocks."""
    block: Count | None = None
    """Tokens of a block; None: by the runs' blocks."""
    json: bool = False
    """Print a JSON object for each run instead of the table."""

    def __post_init__(self):
        super().__post_init__()
        if self.tokens == 1:
            raise ValueError("tokens must be at least 2, or 0 for all, got 1")


class Boundaries(NamedTuple):
    """Distances in tokens: what layers see without compressed tokens, what compressed tokens read, and a block."""

    reach: int
    history: int
    block: int


def window_reach(mechanisms: Sequence[Mechanism], length: int, is_causal: bool = True) -> int:
    """The distance in tokens beyond which layers of sliding windows pass nothing on (BRL-Attention, OpenReview
    Vpyg3fqXbl, proposition 2.2), without what BRL's compressed tokens add; `length` - 1 if a layer has no window."""

    def of_layer(mechanism: Mechanism) -> int:
        if isinstance(mechanism, SideBySideConfig):
            return max(map(of_layer, mechanism.both.values()))
        local = mechanism.local if isinstance(mechanism, BRLConfig) else mechanism
        if not isinstance(local, LocalConfig) or local.pattern != "sliding":
            return length - 1
        window = SlidingWindow.of_width(local.window, is_causal)
        return max(window.left, window.right)

    return min(sum(map(of_layer, mechanisms)), length - 1)


def boundaries(config: DecoderConfig, length: int) -> Boundaries:
    """The boundaries of a decoder that reads rows of a length; the reach of a mechanism without a window is the row."""
    memories = [m for m in config.mechanisms if isinstance(m, BRLConfig) and m.num_compressed]
    return Boundaries(
        window_reach(config.mechanisms, length + 1),
        max((m.history + m.block - 1 for m in memories), default=length),
        min([*(m.block for m in memories), length]),
    )


def common_boundaries(own: Sequence[Boundaries], options: ContextOptions) -> Boundaries:
    """The boundaries by which all runs are measured: the options', or else what suits every run."""
    return Boundaries(
        min(each.reach for each in own) if options.reach is None else options.reach,
        max(each.history for each in own) if options.history is None else options.history,
        min(each.block for each in own) if options.block is None else options.block,
    )


def last_distances(stream: Int[np.ndarray, " N"], ngram: int) -> Int[np.ndarray, " M"]:
    """For each target stream[1:], how many tokens before its predecessor the same n-gram ended last.

    0 means that the predecessor itself ended it; -1 that it never occurred, or that the target has fewer than ngram - 1
    tokens before it.
    """
    length = len(stream)
    if length < ngram:
        return np.full(length - 1, -1)
    tokens = names = np.unique(stream, return_inverse=True)[1].reshape(-1).astype(np.int64)
    for i in range(1, ngram):
        # The name of an n-gram combines the name without its last token, and this token.
        names = np.unique(names[:-1] * length + tokens[i:], return_inverse=True)[1].reshape(-1)
    order = np.argsort(names, kind="stable")
    found = np.full(len(names), -1)
    repeats = names[order[1:]] == names[order[:-1]]
    found[order[1:]] = np.where(repeats, order[1:] - order[:-1] - 1, -1)
    return np.concatenate([np.full(ngram - 1, -1), found])[1:]


def token_losses(
    model: DecoderLM, params: Any, memory: Any, tokens: Int[Array, "B T"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Any]:
    """The loss of each target in nats, and the new memory. Logits are computed for one row at a time."""
    variables = {"params": params}
    hidden, memory = model.apply(variables, tokens, memory=memory, method="hidden")

    def row(xs: Any) -> Any:
        logits: Any = model.apply(variables, xs[0][None], method="logits")
        return jax.nn.logsumexp(logits[0], -1) - jnp.take_along_axis(logits[0], xs[1][:, None], 1)[:, 0]

    return jax.lax.map(row, (hidden, targets)), memory


def read_losses(run: Run, corpus: Corpus, limit: int) -> dict[str, np.ndarray]:
    """The text as its rows read it, each a stream of N tokens: arrays (rows, N).

    "tokens", "targets", "weights", and the losses "carried" and "cleared", with and without the memory of earlier
    batches.
    """
    config: LmConfig = run.config
    step = jax.jit(
        lambda params, memory, tokens, targets: token_losses(run.model, params, memory, tokens, targets)
    )
    held_out = held_out_stream(corpus, config, limit)
    empty = memory = run.model.init_memory(held_out.batch)
    read: list[dict[str, np.ndarray]] = []
    for batch in held_out:
        arrays = (jnp.asarray(batch["tokens"]), jnp.asarray(batch["targets"]))
        carried, memory = step(run.params, memory, *arrays)
        # Without a memory, the second reading would repeat the first.
        cleared = carried if empty is None else step(run.params, empty, *arrays)[0]
        shown = {name: batch[name] for name in ("tokens", "targets", "weights")}
        read.append({**shown, "carried": np.asarray(carried), "cleared": np.asarray(cleared)})
    return {name: np.concatenate([part[name] for part in read], axis=1) for name in read[0]}


def _averages(read: dict[str, np.ndarray], chosen: np.ndarray) -> dict[str, Any]:
    """The number of the chosen targets and their mean losses, or None without targets."""
    chosen = chosen & (read["weights"] > 0)
    count = int(chosen.sum())
    losses = {name: float(read[name][chosen].mean(dtype=np.float64)) if count else None for name in _LOSSES}
    return {"targets": count, **losses}


def summarise(read: dict[str, np.ndarray], length: int, borders: Boundaries, ngram: int) -> dict[str, Any]:
    """The losses of `read_losses` in all, by position and by distance; rows of a batch have `length` tokens."""
    streams = np.concatenate([read["tokens"], read["targets"][:, -1:]], axis=1)
    distance = np.stack([last_distances(stream, ngram) for stream in streams])
    place = np.broadcast_to(np.arange(distance.shape[1]) % length % borders.block, distance.shape)
    part = -(-borders.block // min(_PARTS, borders.block))
    regions = {
        "within reach": (distance >= 0) & (distance <= borders.reach),
        "history": (distance > borders.reach) & (distance <= borders.history),
        "beyond": distance > max(borders.reach, borders.history),
        "new": distance < 0,
    }
    farthest = max(1, int(distance.max()))
    edges = [0, *(2**i for i in range(farthest.bit_length() + 1))]
    return {
        **_averages(read, np.ones(distance.shape, bool)),
        "regions": {name: _averages(read, chosen) for name, chosen in regions.items()},
        "by_position": [
            {"first": first, **_averages(read, (place >= first) & (place < first + part))}
            for first in range(0, borders.block, part)
        ],
        "by_distance": [
            {"first": low, "end": high, **_averages(read, (distance >= low) & (distance < high))}
            for low, high in itertools.pairwise(edges)
        ],
    }


def measure(options: ContextOptions) -> list[dict[str, Any]]:
    """The JSON object of each run."""
    runs = [reading(open_run([LM], workdir, options.checkpoint), options.data) for workdir in options.workdir]
    own = [boundaries(run.config.model, run.config.loop.length) for run in runs]
    borders = common_boundaries(own, options)
    results = []
    for run in runs:
        config = run.config
        corpus = LM.load(config, (options.split,)).corpora[options.split]
        if len(corpus.tokens) < 2:
            raise UserError(f"--data: evaluation takes at least 2 tokens, got {len(corpus.tokens)}")
        read = read_losses(run, corpus, options.tokens)
        results.append(
            {
                "workdir": config.loop.workdir,
                "mechanism": mechanism_names(config.model),
                "step": run.step,
                "split": options.split,
                "length": config.loop.length,
                "ngram": options.ngram,
                **borders._asdict(),
                **summarise(read, config.loop.length, borders, options.ngram),
            }
        )
    return results


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.4f}"


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Losses in nats a token: in all and by region, one row for each run, with the memory carried and cleared."""
    first = results[0]
    regions = list(first["regions"])
    where = {
        "within reach": f"within reach (to {first['reach']})",
        "history": f"history (to {first['history']})",
    }
    what = "the target" if first["ngram"] == 1 else f"the {first['ngram']} tokens that end with the target"
    title = f"Loss in nats a token, by the distance to the last occurrence of {what}."
    by_region = Table("run", "memory", "all", *(where.get(name, name) for name in regions), title=title)
    places = [str(part["first"]) for part in first["by_position"]]
    title = f"By the first position of a part of the block of {first['block']} tokens, memory carried:"
    by_position = Table("run", *places, title=title)
    for label, result in zip(run_labels(results), results, strict=True):
        parts = [result["regions"][name] for name in regions]
        shares = [f"{100 * part['targets'] / max(result['targets'], 1):.1f}%" for part in parts]
        by_region.add(label, "targets", result["targets"], *shares)
        for memory in _LOSSES:
            losses = (_number(part[memory]) for part in parts)
            by_region.add(label, memory, _number(result[memory]), *losses)
        by_position.add(label, *(_number(part["carried"]) for part in result["by_position"]))
    return f"{by_region}\n\n{by_position}"


def _by_distance(result: dict[str, Any], memory: str) -> np.ndarray:
    """Rows (distance, loss) of the bins that have targets, at the middle of each on a logarithmic axis."""
    bins = [each for each in result["by_distance"] if each["targets"]]
    rows = [(np.sqrt((each["first"] + 1) * each["end"]), each[memory]) for each in bins]
    return np.array(rows).reshape(-1, 2)  # two columns even without rows


def draw(results: Sequence[dict[str, Any]]) -> Figure:
    """Four panels: the loss with and without memory, by position in the block, by distance, and the difference by
    distance from the first run (for a single run, carried less cleared)."""
    figure, axs = panels(2, 2, (15, 9))
    (totals, by_position), (by_distance, by_gain) = axs
    names = run_labels(results)
    styles = line_styles(names)
    alone = len(results) == 1
    for i, (name, result) in enumerate(zip(names, results)):
        style = {**styles[name], "markersize": 5}
        totals.plot([0, 1], [result["carried"], result["cleared"]], label=name, **style)
        places = [part["first"] for part in result["by_position"]]
        by_position.plot(places, [part["carried"] for part in result["by_position"]], **style)
        carried, cleared = (_by_distance(result, memory) for memory in _LOSSES)
        by_distance.plot(*carried.T, **style)
        reference = cleared if alone else _by_distance(results[0], "carried")
        # Runs that read other tokens have other bins, which cannot be subtracted.
        if np.array_equal(reference[:, 0], carried[:, 0]) and (alone or i):
            by_gain.plot(carried[:, 0], carried[:, 1] - reference[:, 1], **style)
    for axes in (by_distance, by_gain):
        for name, dashes in (("reach", "--"), ("history", ":")):
            axes.axvline(results[0][name] + 1, color="#999999", linestyle=dashes, label=name)
        axes.set_xscale("log", base=2)
        plain_log_axis(axes.xaxis)
        axes.set_xlabel("tokens back to the last occurrence")
    by_gain.axhline(0, color="#999999", linewidth=0.8)
    totals.set(ylabel="loss, nats a token", title="memory", xticks=[0, 1], xlim=(-0.5, 1.5))
    totals.set_xticklabels(["carried", "cleared at every row"])
    title = "by position, memory carried"
    by_position.set(xlabel="position in the block", ylabel="loss, nats a token", title=title)
    by_distance.set(ylabel="loss, nats a token", title="by distance, memory carried")
    title = "carried less cleared" if alone else f"difference from {names[0]}"
    by_gain.set(ylabel="difference of the loss, nats", title=title)
    by_distance.legend(frameon=False)
    shared_legend(figure, totals)
    return figure


@command(ContextOptions(), "eval.context", "Where a language model's context pays.")
def main(options: ContextOptions) -> None:
    picture = picture_path(options.picture)
    results = measure(options)
    print("\n".join(map(json.dumps, results)) if options.json else markdown(results))
    if picture is not None:
        save(draw(results), picture)
