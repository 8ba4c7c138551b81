"""Measures what an encoder-decoder writes by itself: python -m eval.copy --workdir DIR [--length N ...].

The model generates each target greedily, from the source alone. The last line of stdout is one JSON object: for each
length ("cases") the share of target tokens that are right at their place, END among them, and the share of targets
that are right as a whole. Without --length the lengths of symbols are those of training, and two and four times the
longest of these; every source has exactly that length. Pairs of texts are those of the test split, in the buckets of
training. What is measured without options is kept as copy_test.json in the run's folder. `--source TEXT` writes the
target of a text.

python -m eval.copy --table DIR [--picture FILE.png] measures the runs under DIR that have not been measured, prints a
table of them as markdown, and draws accuracy against length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
from etils import epath

from brl_jax.decoding import generate
from brl_jax.layers import mechanism_name
from eval.harness.main import Evaluation, Measured, TableOptions
from eval.harness.runs import Run, run_facts
from eval.tasks.copy_table import draw, markdown
from train.data.copying import BEGIN, SPECIAL
from train.data.lra.listops import END
from train.data.tokenizers.named import load_tokenizer
from train.engine.batch import Batch
from train.engine.config_file import flatten, to_json
from train.engine.errors import UserError, one_line
from train.tasks.copy import COPY
from train.tasks.copy_config import CopyConfig


@dataclasses.dataclass(frozen=True)
class CopyEvalOptions(TableOptions):
    """What to measure."""

    workdir: str | None = None
    """Folder of a run."""
    length: tuple[int, ...] = ()
    """Symbols of the sources to measure on; by default the lengths of training, and two and four times the longest."""
    source: tuple[str, ...] = ()
    """Texts whose targets are written, in place of measures."""

    def __post_init__(self):
        if self.length and min(self.length) < 1:
            raise ValueError(f"length must be one or more numbers of at least 1, got {self.length}")
        if self.source and self.table is not None:
            raise ValueError("source must be given with workdir, not with table")


def write_targets(run: Run, source: np.ndarray, lengths: np.ndarray | None, most: int) -> np.ndarray:
    """(B, most) int32, the likeliest token after another: targets up to END, then zeros."""
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
    except ValueError as error:  # longer than a mechanism serves
        raise UserError(f"--length: the model cannot write {most} tokens: {one_line(error)}") from error
    return np.asarray(written)[:, 1:]


def measure_batches(run: Run, batches: Iterable[Batch]) -> list[dict[str, Any]]:
    """The shares of right tokens and of right targets, and how many targets there were, for each length of a batch."""
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


def run_settings(config: CopyConfig) -> dict[str, Any]:
    """The settings in which runs of a row of the table agree. Where the encoder has a mechanism of its own, the name of
    the decoder's (the first one's of a hybrid) begins with it: runs are labelled by the mechanisms of both sides."""
    settings = {part: to_json(getattr(config, part)) for part in ("data", "model", "optimizer")}
    settings["loop"] = {name: getattr(config.loop, name) for name in ("batch", "steps")}
    del settings["data"]["test_rows"]
    flat, encoder = flatten(settings), config.model.encoder_mechanism
    if encoder is not None:
        flat["model.mechanism.name"] = f"{mechanism_name(encoder)} to {flat['model.mechanism.name']}"
    return flat


class _CopyEvaluation(Evaluation[CopyEvalOptions]):
    kept = "copy_test.json"

    def is_standard(self, options: CopyEvalOptions) -> bool:
        return super().is_standard(options) and not options.length and not options.source

    def measure(self, run: Run, options: CopyEvalOptions) -> Measured:
        """The accuracies of a run and what was measured; or the targets of texts."""
        config = run.config
        if options.source:
            return Measured(_write_texts(run, options.source))
        if config.data.data_dir and options.length:
            raise UserError(
                "--length: expected a run on symbols; pairs of texts have the lengths that they have"
            )
        longest = config.data.longest
        lengths = options.length or (*config.data.length, 2 * longest, 4 * longest)
        data = COPY.load(config, ("test",))
        cases = measure_batches(run, COPY.held_out(config, data, "test", lengths=sorted(set(lengths))))
        return Measured(
            {"settings": run_settings(config), "trained": longest, "cases": cases, **run_facts(run)}
        )


def _write_texts(run: Run, texts: Sequence[str]) -> dict[str, Any]:
    """The texts and their targets.

    Raises:
      UserError: the run is on symbols, or a text has no tokens.
    """
    data = run.config.data
    if not data.data_dir:
        raise UserError("--source: expected a run on pairs of texts (--data_dir), got one on symbols")
    tokenizer = load_tokenizer(epath.Path(run.config.loop.workdir))
    targets = []
    for text in texts:
        source = tokenizer.encode(text)[: data.longest]
        if not len(source):
            raise UserError(f"--source: expected at least one token of text, got {text!r}")
        written = write_targets(run, np.asarray(source)[None], None, data.longest + 1)[0]
        end = np.flatnonzero(written == tokenizer.vocab_size + END)
        written = written[: end[0]] if end.size else written
        targets.append(tokenizer.decode(written[written < tokenizer.vocab_size]))
    return {"source": list(texts), "target": targets, "step": run.step}


def main(argv: Sequence[str]) -> None:
    """Prints the measures or the table; see the module's text and --help."""
    _CopyEvaluation(
        [COPY],
        CopyEvalOptions(),
        name="eval.copy",
        about="Measures what an encoder-decoder writes by itself.",
        markdown=markdown,
        draw=draw,
    ).main(argv)
