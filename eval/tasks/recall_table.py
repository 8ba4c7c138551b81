"""Runs of recall as a table and a picture."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.harness.groups import alike
from eval.harness.pictures import line_styles, plain_log_axis, shared_legend
from train.engine.errors import UserError

Result = Mapping[str, Any]

_NAME = "model.mechanism.name"
_LATE = "model.late_mechanism"
_IN_ROW = "naming the row's most frequent answer"


def _network(settings: Mapping[str, Any]) -> str:
    """The mechanisms of a network's layers, joined by + in a hybrid, and patterns other than sliding windows."""
    late = settings.get(f"{_LATE}.name")
    name = settings[_NAME] if late is None else f"{settings[_NAME]} + {late}"
    parts = ("model.encoder_mechanism", "model.mechanism", _LATE)
    patterns = {settings.get(f"{part}.pattern", "sliding") for part in parts} - {"sliding"}
    return " ".join([name, *(f"({pattern.replace('_', ' ')})" for pattern in sorted(patterns))])


def _is_hybrid(result: Result) -> bool:
    return f"{_LATE}.name" in result["settings"]


def grouped(results: Sequence[Result]) -> dict[str, list[Result]]:
    """The runs by label; those that differ in their seed only have one label.

    A label is the names of the mechanisms and the settings in which the runs shown with these mechanisms differ.
    """
    ordered = sorted(results, key=lambda result: _network(result["settings"]))
    return alike(ordered, lambda result: _network(result["settings"]), "settings")


def _case(result: Result, length: int, pairs: int) -> Mapping[str, Any] | None:
    return next((c for c in result["cases"] if (c["length"], c["pairs"]) == (length, pairs)), None)


def _all_cases(results: Sequence[Result]) -> list[tuple[int, int]]:
    return sorted({(case["length"], case["pairs"]) for result in results for case in result["cases"]})


def _last_trained(result: Result) -> Mapping[str, Any]:
    """The longest case of training, with the most records; of what was measured where that was not."""
    cases = [_case(result, *case) for case in sorted(result["trained"], reverse=True)]
    return next((case for case in cases if case is not None), result["cases"][0])


def percent(values: Sequence[float]) -> str:
    """The mean of shares in percent, and where there are several the lowest and the highest."""
    shares = [100 * value for value in values]
    mean = f"{np.mean(shares):.1f}"
    return mean if len(shares) == 1 else f"{mean} ({min(shares):.1f} to {max(shares):.1f})"


def markdown(results: Sequence[Result]) -> str:
    """A row for each group of runs that differ in their seed only, and two for what guessing gives."""
    cases = _all_cases(results)
    lines = [
        "Accuracy in percent by tokens/records of a row: mean over the seeds (lowest to highest). Bytes of state are "
        "those of the longest row of training.",
        "",
        "| mechanism | parameters | bytes of state | seeds | step of 90% | "
        + " | ".join(f"{length}/{pairs}" for length, pairs in cases)
        + " |",
        "|---" * (5 + len(cases)) + "|",
    ]
    for label, runs in grouped(results).items():
        cells = []
        for case in cases:
            values = [found["accuracy"] for run in runs if (found := _case(run, *case)) is not None]
            cells.append(percent(values) if values else "-")
        learned = ", ".join("never" if run["learned_at"] is None else str(run["learned_at"]) for run in runs)
        lines.append(
            f"| {label} | {runs[0]['parameters']} | {_last_trained(runs[0])['state_bytes']} "
            f"| {', '.join(str(run['seed']) for run in runs)} | {learned} | {' | '.join(cells)} |"
        )
    for name, text in (("guess_in_row", _IN_ROW), ("chance", "chance")):
        guesses = []
        for case in cases:
            known = [found for run in results if (found := _case(run, *case)) is not None]
            guesses.append(" or ".join(sorted({f"{100 * found[name]:.1f}" for found in known})))
        lines.append(f"| {text} | - | - | - | - | {' | '.join(guesses)} |")
    return "\n".join(lines)


def draw(results: Sequence[Result]) -> Figure:
    """Accuracy against bytes of state and, where there are several of them, against records for each compressed token
    and against lengths.

    Hybrids have hollow markers. A grey line leads through the best accuracy with so many bytes of state, or fewer.

    Raises:
      UserError: the runs are of different kinds, whose accuracies mean different things.
    """
    kinds = sorted({result["settings"]["data.kind"] for result in results})
    if len(kinds) > 1:
        raise UserError(
            f"--picture: expected runs of one kind of rows, got {', '.join(kinds)}; --table of one of their folders "
            "draws those alone"
        )
    groups = grouped(results)
    shares = {pairs / m for r in results if (m := r["num_compressed"]) for _, pairs in r["trained"]}
    wanted = (len(shares) > 1, len({length for length, _ in _all_cases(results)}) > 1)
    figure = Figure(figsize=(5 * sum(wanted) + 8, 5.5), layout="constrained")
    by_bytes, *others = figure.subplots(1, 1 + sum(wanted), squeeze=False)[0]
    drawn = iter(others)
    by_records, by_length = (next(drawn) if want else None for want in wanted)
    panels = [axes for axes in (by_bytes, by_records, by_length) if axes is not None]
    styles = line_styles(list(groups))
    for label, runs in groups.items():
        style = {**styles[label], "markersize": 6}
        trained = [_last_trained(run) for run in runs]
        accuracies = [100 * case["accuracy"] for case in trained]
        mean = float(np.mean(accuracies))
        around = [[mean - min(accuracies)], [max(accuracies) - mean]]
        point = {**style, "linestyle": "none", "fillstyle": "none" if _is_hybrid(runs[0]) else "full"}
        by_bytes.errorbar([trained[0]["state_bytes"] / 1024], [mean], around, label=label, capsize=3, **point)
        cases = [
            (length, pairs, float(np.mean([100 * c["accuracy"] for c in found])))
            for length, pairs in _all_cases(runs)
            if (found := [c for run in runs if (c := _case(run, length, pairs)) is not None])
        ]
        if by_records is not None and runs[0]["num_compressed"]:
            own = [
                (pairs / runs[0]["num_compressed"], y)
                for length, pairs, y in cases
                if _is_trained(runs, pairs, length)
            ]
            by_records.plot(*zip(*sorted(own)), **style)
        most = max(pairs for _, pairs, _ in cases)
        line = [(length, y) for length, pairs, y in cases if pairs == most]
        if by_length is not None:
            by_length.plot(*zip(*sorted(line)), **style)
    curve = frontier(groups.values())
    by_bytes.step(
        [x / 1024 for x, _ in curve],
        [100 * y for _, y in curve],
        where="post",
        color="#999999",
        linewidth=1,
        label="the best with at most these bytes",
        zorder=0,
    )
    for name, text, dashes in (("guess_in_row", _IN_ROW, "--"), ("chance", "chance", ":")):
        lowest = min(100 * case[name] for result in results for case in result["cases"])
        for axes in panels:
            axes.axhline(lowest, color="#999999", linestyle=dashes, label=text)
    by_bytes.set(xlabel="KiB of state of a row (decoding cache)", title="the longest rows of training")
    if by_records is not None:
        by_records.set(xlabel="records for each compressed token", title="BRL, the lengths of training")
    if by_length is not None:
        by_length.set(xlabel="tokens of a row", title="the most records")
    for axes in panels:
        axes.set_xscale("log")
        plain_log_axis(axes.xaxis)
    if by_length is not None:
        by_length.set_xticks(sorted({length for length, _ in _all_cases(results)}))
    for axes in panels:
        axes.set(ylabel="accuracy, %", ylim=(0, 102))
        axes.grid(True, alpha=0.3)
    shared_legend(figure, by_bytes)
    return figure


def frontier(groups: Iterable[Sequence[Result]]) -> list[tuple[int, float]]:
    """The bytes of state at which a group of runs, in the longest rows of training, has a higher mean accuracy than all
    groups with fewer bytes, and that accuracy."""
    points = sorted(
        (
            _last_trained(runs[0])["state_bytes"],
            -float(np.mean([_last_trained(run)["accuracy"] for run in runs])),
        )
        for runs in groups
    )
    best: list[tuple[int, float]] = []
    for size, negative in points:
        if not best or -negative > best[-1][1]:
            best.append((size, -negative))
    return best


def _is_trained(runs: Sequence[Result], pairs: int, length: int) -> bool:
    return [length, pairs] in runs[0]["trained"]
