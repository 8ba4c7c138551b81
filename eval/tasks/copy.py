"""Measures what an encoder-decoder writes by itself: python -m eval.copy --workdir DIR [--length N ...].

The model generates each target greedily, from the source alone. "cases" has, for each length, the share of target
tokens that are right at their place, END included, and the share of targets that are right as a whole. Pairs of texts
come from the test split, in the buckets of training; a source of symbols has exactly its length. `--source TEXT` writes
the target of a text, and `--table DIR` prints a table of the runs under DIR.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from etils import epath
from matplotlib.figure import Figure

from brl_jax.decoding import generate
from brl_jax.fields import Length
from eval.harness.groups import by_network
from eval.harness.main import Evaluation
from eval.harness.options import TableOptions
from eval.harness.pictures import line_styles, panels, shared_legend
from eval.harness.runs import Run, run_facts
from eval.harness.table import Result, Table, percent, seeds
from train.data.copying import BEGIN, END, SPECIAL
from train.data.tokenizers.base import encode_given
from train.data.tokenizers.named import load_tokenizer
from train.engine.batch import Batch
from train.engine.errors import UserError, one_line
from train.tasks.copy import COPY

_MEASURES = {"token_accuracy": "tokens", "sequence_accuracy": "whole targets"}


@dataclasses.dataclass(frozen=True)
class CopyEvalOptions(TableOptions):
    """What to measure."""

    length: tuple[Length, ...] = ()
    """Symbols of the sources to measure on; by default the lengths of training, and two and four times the longest."""
    source: tuple[str, ...] = ()
    """Write the targets of these texts instead of measuring."""

    def __post_init__(self):
        if self.source and self.table is not None:
            raise ValueError("source must be given with workdir, not with table")

    def without_effect(self) -> dict[str, str]:
        """See `train.cli.options.parse_options`."""
        unused = {"length": "with source", "picture": "with source"} if self.source else {}
        return super().without_effect() | unused


def write_targets(run: Run, source: np.ndarray, lengths: np.ndarray | None, most: int) -> np.ndarray:
    """(B, most) int32, greedily generated targets up to END, then zeros."""
    first = run.config.model.vocab_size - SPECIAL
    try:
        written = generate(
            run.model,
            {"params": run.params},
            np.full((len(source), 1), first + BEGIN),
            max_new_tokens=most,
            temperature=0,
            stop_tokens=[first + END],
            source=source,
            source_lengths=lengths,
        )
    except ValueError as error:  # longer than a mechanism supports
        raise UserError(f"--length: the model cannot write {most} tokens: {one_line(error)}") from error
    return np.asarray(written)[:, 1:]


def measure_batches(run: Run, batches: Iterable[Batch]) -> list[dict[str, Any]]:
    """The shares of right tokens and of right targets, and the number of targets, for each length of a batch."""
    counts: dict[int, np.ndarray] = {}
    for batch in batches:
        targets, counted = batch["targets"], batch["weights"] > 0
        written = write_targets(run, batch["source"], batch["source_lengths"], targets.shape[1])
        right = (written == targets) & counted
        exists = counted.any(axis=1)
        whole = exists & (right == counted).all(axis=1)
        sums = np.array([right.sum(), counted.sum(), whole.sum(), exists.sum()])
        length = targets.shape[1] - 1
        counts[length] = counts.get(length, 0) + sums
    return [
        {
            "length": length,
            "token_accuracy": float(right / tokens),
            "sequence_accuracy": float(whole / rows),
            "rows": int(rows),
        }
        for length, (right, tokens, whole, rows) in sorted(counts.items())
    ]


def measure(run: Run, options: CopyEvalOptions) -> dict[str, Any]:
    """The accuracies of a run and facts about it; or the targets of texts."""
    config = run.config
    if options.source:
        return _write_texts(run, options.source)
    if config.data.data_dir and options.length:
        raise UserError("--length: expected a run on symbols; the lengths of pairs of texts are given")
    longest = config.data.longest
    lengths = options.length or (*config.data.length, 2 * longest, 4 * longest)
    data = COPY.load(config, ("test",))
    if data is None:  # every source has exactly its length
        exact = dataclasses.replace(config.data, length=tuple(sorted(set(lengths))), min_length=max(lengths))
        config = dataclasses.replace(config, data=exact)
    cases = measure_batches(run, COPY.held_out(config, data, "test"))
    return {"trained": longest, "cases": cases, **run_facts(run)}


def _write_texts(run: Run, texts: Sequence[str]) -> dict[str, Any]:
    """The texts and their targets."""
    data = run.config.data
    if not data.data_dir:
        raise UserError("--source: expected a run on pairs of texts (--data_dir), got one on symbols")
    tokenizer = load_tokenizer(epath.Path(run.config.loop.workdir))
    targets = []
    for text in texts:
        source = encode_given(tokenizer, text, "--source")[: data.longest]
        written = write_targets(run, source[None], None, data.longest + 1)[0]
        end = np.flatnonzero(written == tokenizer.vocab_size + END)
        written = written[: end[0]] if end.size else written
        targets.append(tokenizer.decode(written[written < tokenizer.vocab_size]))
    return {"source": list(texts), "target": targets, "step": run.step}


def _values(runs: Sequence[Result], length: int, measure: str) -> list[float]:
    return [case[measure] for run in runs for case in run["cases"] if case["length"] == length]


def _lengths(results: Sequence[Result]) -> list[int]:
    return sorted({case["length"] for result in results for case in result["cases"]})


def markdown(results: Sequence[Result]) -> str:
    """A row for each group of runs that differ only in their seed."""
    lengths = _lengths(results)
    table = Table(
        "mechanism", "parameters", "trained to", "seeds", *map(str, lengths),
        title="Right tokens / right targets in percent by length of the source, written greedily: mean over the seeds "
        "(lowest to highest).",
    )  # fmt: skip
    for label, runs in by_network(results).items():
        cells = []
        for length in lengths:
            found = [_values(runs, length, measure) for measure in _MEASURES]
            cells.append(" / ".join(map(percent, found)) if found[0] else "-")
        table.add(label, runs[0]["parameters"], runs[0]["trained"], seeds(runs), *cells)
    return str(table)


def draw(results: Sequence[Result]) -> Figure:
    """Accuracy by token and by target against the length; vertical lines mark the longest lengths of training."""
    named = by_network(results)
    figure, axs = panels(1, 2, (13, 5))
    styles = line_styles(list(named))
    for axes, (measure, name) in zip(axs[0], _MEASURES.items()):
        for label, runs in named.items():
            lengths = _lengths(runs)
            means = [100 * float(np.mean(_values(runs, length, measure))) for length in lengths]
            axes.plot(lengths, means, label=label, markersize=6, **styles[label])
        for trained in sorted({result["trained"] for result in results}):
            axes.axvline(trained, color="#999999", linestyle=":", linewidth=1)
        axes.set_xscale("log", base=2)
        axes.set_xticks(_lengths(results), [str(length) for length in _lengths(results)])
        axes.set(xlabel="length of the source", ylabel="accuracy, %", ylim=(-2, 102), title=name)
    shared_legend(figure, axs[0, 0])
    return figure


main = Evaluation(
    [COPY], CopyEvalOptions(), "eval.copy", "Measures what an encoder-decoder writes by itself.",
    measure, markdown, draw, kept="copy_test.json",
).main  # fmt: skip
