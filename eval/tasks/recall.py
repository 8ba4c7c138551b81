"""Measures recall: python -m eval.recall --workdir DIR [--length N ... --pairs P ...].

The last line of stdout is one JSON object: for each length and number of records ("cases") the accuracy on fresh rows
beside that of guessing, and the bytes that generation keeps of a row of that length (the arrays of the decoding cache).
Without --length and --pairs the cases are those of training, and rows two and four times as long as the longest of
these. What is measured without options is kept as recall_test.json in the run's folder.

python -m eval.recall --table DIR [--picture FILE.png] measures the runs under DIR that have not been measured, prints a
table of them as markdown, and draws accuracy against bytes of state, against records for each compressed token, and
against the length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax

from brl_jax.layers import BRLConfig
from brl_jax.models import DecoderLM
from eval.harness.main import Evaluation, Measured, TableOptions
from eval.harness.runs import Run, run_facts
from eval.tasks.recall_table import draw, markdown
from train.data.recall import Case, RecallDataConfig, obstacle
from train.engine.config_file import flatten, to_json
from train.engine.errors import UserError, one_line
from train.engine.metrics import log, read_metrics
from train.tasks.recall import RECALL

# A run has learned its task where the held-out accuracy reaches this.
_LEARNED = 0.9


@dataclasses.dataclass(frozen=True)
class RecallEvalOptions(TableOptions):
    """What to measure."""

    workdir: str | None = None
    """Folder of a run."""
    length: tuple[int, ...] = ()
    """Lengths of the rows to measure on; by default those of training, and two and four times the longest."""
    pairs: tuple[int, ...] = ()
    """Numbers of records, each with every length that has room for it; by default those of training."""


def chosen_cases(data: RecallDataConfig, lengths: Sequence[int], pairs: Sequence[int]) -> tuple[Case, ...]:
    """The cases that the options ask for.

    Raises:
      UserError: there are no rows of one of these lengths, or with one of these numbers of records.
    """
    longest = max(data.length)
    wanted = data.cases if not lengths and not pairs else ()
    wanted += tuple(
        Case(length, count)
        for length in (lengths or ((2 * longest, 4 * longest) if not pairs else data.length))
        for count in (pairs or [case.pairs for case in data.cases])
    )
    complaints = {case: obstacle(data, case) for case in dict.fromkeys(wanted)}
    for part, values in (("length", lengths), ("pairs", pairs)):
        for value in values:
            refused = [complaints[case] for case in complaints if getattr(case, part) == value]
            if None not in refused:
                raise UserError(f"--{refused[0]}")
    return tuple(sorted(case for case, complaint in complaints.items() if complaint is None))


def state_bytes(model: DecoderLM, length: int) -> int:
    """The bytes of the decoding cache of one row that has room for `length` tokens."""
    cache = jax.eval_shape(lambda: model.init_cache(1, length))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(cache))


def _refusal(model: DecoderLM, length: int) -> str | None:
    """Why a network cannot read rows of a length; None if it can."""
    try:
        state_bytes(model, length)
    except ValueError as error:
        return one_line(error)
    return None


def learned_at(workdir: str) -> int | None:
    """The step of the first evaluation while training with an accuracy of 90%; None if there is none.

    Raises:
      UserError: the run's metrics are missing.
    """
    learned = (line["step"] for line in read_metrics(workdir) if line.get("val_accuracy", 0.0) >= _LEARNED)
    return next(learned, None)


class _RecallEvaluation(Evaluation[RecallEvalOptions]):
    kept = "recall_test.json"

    def is_standard(self, options: RecallEvalOptions) -> bool:
        return super().is_standard(options) and not options.length and not options.pairs

    def measure(self, run: Run, options: RecallEvalOptions) -> Measured:
        """The accuracies of a run on test rows and what was measured."""
        config = run.config
        cases = chosen_cases(config.data, options.length, options.pairs)
        refused = {length: _refusal(run.model, length) for length in {case.length for case in cases}}
        for length, error in sorted(refused.items()):
            if error is not None and options.length:
                raise UserError(f"--length: {error}")
            if error is not None:
                log(f"eval.recall: {config.loop.workdir} is not measured at {length} tokens: {error}")
        cases = tuple(case for case in cases if refused[case.length] is None)
        mechanism = config.model.mechanism
        measured = RECALL.measure_cases(config, run.model, run.params, "test", cases)
        settings = {part: to_json(getattr(config, part)) for part in ("data", "model", "optimizer")}
        settings["loop"] = {name: getattr(config.loop, name) for name in ("batch", "steps")}
        del settings["data"]["test_rows"]
        return Measured(
            {
                "settings": flatten(settings),
                "trained": [list(case) for case in dict.fromkeys(config.data.cases)],
                "cases": [
                    {**case, "state_bytes": state_bytes(run.model, case["length"])} for case in measured
                ],
                "num_compressed": mechanism.num_compressed if isinstance(mechanism, BRLConfig) else None,
                "learned_at": learned_at(config.loop.workdir),
                **run_facts(run),
            }
        )


EVALUATION = _RecallEvaluation(
    [RECALL],
    RecallEvalOptions(),
    name="eval.recall",
    about="Measures recall at any length.",
    markdown=markdown,
    draw=draw,
)


def main(argv: Sequence[str]) -> None:
    """Prints the measures or the table; see the module's text and --help."""
    EVALUATION.main(argv)
