"""Measures recall: python -m eval.recall --workdir DIR [--length N ... --pairs P ...].

For each length and number of records ("cases") the accuracy on fresh rows, the accuracy of guessing, and the bytes that
generation keeps for a row of that length (the arrays of the decoding cache). --table DIR [--picture FILE.png] prints a
table of the runs under DIR, and draws accuracy against bytes of state, against operations of training, against records
for each compressed token, and against the length.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from matplotlib.figure import Figure

from brl_jax.fields import Count, Length
from brl_jax.layers import BRLConfig
from brl_jax.models import DecoderLM
from eval.harness.groups import by_network, is_hybrid
from eval.harness.main import Evaluation
from eval.harness.options import TableOptions
from eval.harness.pictures import line_styles, panels, plain_log_axis, shared_legend
from eval.harness.runs import Run, operations_of_token, run_facts
from eval.harness.table import Result, Table, percent, seeds
from train.data.recall import Case, RecallDataConfig, unsupported
from train.engine.errors import UserError, one_line
from train.engine.metrics import log, read_metrics
from train.tasks.recall import RECALL

# A run has learned its task when the held-out accuracy reaches this.
_LEARNED = 0.9
_GUESSES = {"guess_in_row": "naming the row's most frequent answer", "chance": "chance"}


@dataclasses.dataclass(frozen=True)
class RecallEvalOptions(TableOptions):
    """What to measure."""

    length: tuple[Length, ...] = ()
    """Lengths of the rows to measure on; by default the lengths of training, and two and four times the longest."""
    pairs: tuple[Count, ...] = ()
    """Numbers of records, each with every length that holds so many; by default the numbers of training."""


def chosen_cases(data: RecallDataConfig, lengths: Sequence[int], pairs: Sequence[int]) -> tuple[Case, ...]:
    """The cases that the options ask for."""
    longest = max(data.length)
    wanted = data.cases if not lengths and not pairs else ()
    wanted += tuple(
        Case(length, count)
        for length in (lengths or ((2 * longest, 4 * longest) if not pairs else data.length))
        for count in (pairs or [case.pairs for case in data.cases])
    )
    complaints = {case: unsupported(data, case) for case in dict.fromkeys(wanted)}
    for part, values in (("length", lengths), ("pairs", pairs)):
        for value in values:
            refused = [complaints[case] for case in complaints if getattr(case, part) == value]
            if None not in refused:
                raise UserError(f"--{refused[0]}")
    return tuple(sorted(case for case, complaint in complaints.items() if complaint is None))


def state_bytes(model: DecoderLM, length: int) -> int:
    """The bytes of one row's decoding cache for `length` tokens."""
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
    """The step of the first evaluation while training with an accuracy of 90%; None if it never got there."""
    learned = (line["step"] for line in read_metrics(workdir) if line.get("val_accuracy", 0.0) >= _LEARNED)
    return next(learned, None)


def measure(run: Run, options: RecallEvalOptions) -> dict[str, Any]:
    """The accuracies of a run on test rows, and facts about the run."""
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
    return {
        "trained": [list(case) for case in dict.fromkeys(config.data.cases)],
        "cases": [{**case, "state_bytes": state_bytes(run.model, case["length"])} for case in measured],
        "num_compressed": mechanism.num_compressed if isinstance(mechanism, BRLConfig) else None,
        "learned_at": learned_at(config.loop.workdir),
        "flops_per_token": operations_of_token(run),
        **run_facts(run),
    }


def _case(result: Result, length: int, pairs: int) -> Mapping[str, Any] | None:
    return next((c for c in result["cases"] if (c["length"], c["pairs"]) == (length, pairs)), None)


def _found(runs: Sequence[Result], length: int, pairs: int) -> list[Mapping[str, Any]]:
    """The case in each run that was measured on it."""
    return [case for run in runs if (case := _case(run, length, pairs)) is not None]


def _all_cases(results: Sequence[Result]) -> list[tuple[int, int]]:
    return sorted({(case["length"], case["pairs"]) for result in results for case in result["cases"]})


def _last_trained(result: Result) -> Mapping[str, Any]:
    """The longest case of training with the most records; the first measured case if no case of training was
    measured."""
    cases = [_case(result, *case) for case in sorted(result["trained"], reverse=True)]
    return next((case for case in cases if case is not None), result["cases"][0])


def markdown(results: Sequence[Result]) -> str:
    """A row for each group of runs that differ only in their seed, and two for guessing."""
    cases = _all_cases(results)
    table = Table(
        "mechanism", "parameters", "MFLOP a token", "bytes of state", "seeds", "step of 90%",
        *(f"{n}/{p}" for n, p in cases),
        title="Accuracy in percent by tokens/records of a row: mean over the seeds (lowest to highest). Operations of "
        "training and bytes of state are of the longest row of training.",
    )  # fmt: skip
    for label, runs in by_network(results).items():
        cells = []
        for case in cases:
            values = [found["accuracy"] for found in _found(runs, *case)]
            cells.append(percent(values) if values else "-")
        learned = ", ".join("never" if run["learned_at"] is None else str(run["learned_at"]) for run in runs)
        first = runs[0]
        table.add(
            label, first["parameters"], f"{first['flops_per_token'] / 1e6:.3f}",
            _last_trained(first)["state_bytes"], seeds(runs), learned, *cells,
        )  # fmt: skip
    for name, text in _GUESSES.items():
        guesses = [
            " or ".join(sorted({f"{100 * found[name]:.1f}" for found in _found(results, *case)}))
            for case in cases
        ]
        table.add(text, None, None, None, None, None, *guesses)
    return str(table)


def draw(results: Sequence[Result]) -> Figure:
    """Accuracy against bytes of state, against operations of training and, if the runs have several, against records
    for each compressed token and against lengths. Hybrids have hollow markers; a grey line joins the best networks with
    at most so many bytes or operations."""
    kinds = sorted({result["configuration"]["data.kind"] for result in results})
    if len(kinds) > 1:
        raise UserError(
            f"--picture: expected runs of one kind of rows, got {', '.join(kinds)}; --table of one of their folders "
            "draws those alone"
        )
    groups = by_network(results)
    shares = {pairs / m for r in results if (m := r["num_compressed"]) for _, pairs in r["trained"]}
    wanted = (len(shares) > 1, len({length for length, _ in _all_cases(results)}) > 1)
    figure, axs = panels(1, 2 + sum(wanted), (5 * sum(wanted) + 13, 5.5))
    by_bytes, by_operations, *others = axs[0]
    costs = ((by_bytes, kibibytes), (by_operations, megaflops))
    free = iter(others)
    by_records, by_length = (next(free) if want else None for want in wanted)
    styles = line_styles(list(groups))
    for label, runs in groups.items():
        style = {**styles[label], "markersize": 6}
        trained = [_last_trained(run) for run in runs]
        accuracies = [100 * case["accuracy"] for case in trained]
        mean = float(np.mean(accuracies))
        around = [[mean - min(accuracies)], [max(accuracies) - mean]]
        point = {**style, "linestyle": "none", "fillstyle": "none" if is_hybrid(runs[0]) else "full"}
        for axes, cost in costs:
            axes.errorbar([cost(runs[0])], [mean], around, label=label, capsize=3, **point)
        cases = [
            (*case, float(np.mean([100 * c["accuracy"] for c in found])))
            for case in _all_cases(runs)
            if (found := _found(runs, *case))
        ]
        if by_records is not None and (compressed := runs[0]["num_compressed"]):
            own = [(p / compressed, y) for length, p, y in cases if [length, p] in runs[0]["trained"]]
            by_records.plot(*zip(*sorted(own)), **style)
        if by_length is not None:
            most = max(pairs for _, pairs, _ in cases)
            by_length.plot(*zip(*sorted((length, y) for length, p, y in cases if p == most)), **style)
    for axes, cost in costs:
        curve = [(x, 100 * y) for x, y in frontier(groups.values(), cost)]
        label = "the best at no higher cost"
        axes.step(*zip(*curve), where="post", color="#999999", linewidth=1, label=label, zorder=0)
        axes.set_title("the longest rows of training")
    by_bytes.set_xlabel("KiB of state of a row (decoding cache)")
    by_operations.set_xlabel("MFLOP of training on a token")
    if by_records is not None:
        by_records.set(xlabel="records for each compressed token", title="BRL, the lengths of training")
    if by_length is not None:
        by_length.set(xlabel="tokens of a row", title="the most records")
    for axes in axs[0]:
        for (name, text), dashes in zip(_GUESSES.items(), ("--", ":")):
            lowest = min(100 * case[name] for result in results for case in result["cases"])
            axes.axhline(lowest, color="#999999", linestyle=dashes, label=text)
        axes.set(xscale="log", ylabel="accuracy, %", ylim=(0, 102))
        plain_log_axis(axes.xaxis)
    if by_length is not None:
        by_length.set_xticks(sorted({length for length, _ in _all_cases(results)}))
    shared_legend(figure, by_bytes)
    return figure


def kibibytes(result: Result) -> float:
    """KiB of state in the longest rows of training."""
    return _last_trained(result)["state_bytes"] / 1024


def megaflops(result: Result) -> float:
    """MFLOP of training on a token."""
    return result["flops_per_token"] / 1e6


def frontier(
    groups: Iterable[Sequence[Result]], cost: Callable[[Result], float]
) -> list[tuple[float, float]]:
    """The cost and the mean accuracy, in the longest rows of training, of each group of runs that is better than all
    groups of lower cost."""
    points = sorted(
        (cost(runs[0]), -float(np.mean([_last_trained(run)["accuracy"] for run in runs]))) for runs in groups
    )
    best: list[tuple[float, float]] = []
    for each, negative in points:
        if not best or -negative > best[-1][1]:
            best.append((each, -negative))
    return best


EVALUATION = Evaluation(
    [RECALL], RecallEvalOptions(), "eval.recall", "Measures recall at any length.", measure, markdown, draw,
    kept="recall_test.json",
)  # fmt: skip
main = EVALUATION.main
