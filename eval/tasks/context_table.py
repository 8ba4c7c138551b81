"""What `eval.context` measures as a table and a picture."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from eval.harness.pictures import line_styles, plain_log_axis, shared_legend
from eval.harness.runs import run_labels


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def markdown(results: Sequence[dict[str, Any]]) -> str:
    """Losses in nats a token: in all and by region, one row for each run, with the memory carried and cleared."""
    first = results[0]
    regions = list(first["regions"])
    where = {
        "within reach": f"within reach (to {first['reach']})",
        "history": f"history (to {first['history']})",
    }
    what = "the target" if first["ngram"] == 1 else f"the {first['ngram']} tokens that end with the target"
    lines = [
        f"Loss in nats a token, by the distance to the last occurrence of {what}.",
        "",
        f"| run | memory | all | {' | '.join(where.get(name, name) for name in regions)} |",
        "|---" * (3 + len(regions)) + "|",
    ]
    labels = run_labels(results)
    for label, result in zip(labels, results, strict=True):
        shares = [result["regions"][name]["targets"] / max(result["targets"], 1) for name in regions]
        lines.append(
            f"| {label} | targets | {result['targets']} | "
            + " | ".join(f"{100 * share:.1f}%" for share in shares)
            + " |"
        )
        lines += [
            f"| {label} | {memory} | {_number(result[memory])} | "
            + " | ".join(_number(result["regions"][name][memory]) for name in regions)
            + " |"
            for memory in ("carried", "cleared")
        ]
    parts = [f"{part['first']}" for part in first["by_position"]]
    lines += [
        "",
        f"By the first position of a part of the block of {first['block']} tokens, memory carried:",
        "",
        f"| run | {' | '.join(parts)} |",
        "|---" * (1 + len(parts)) + "|",
    ]
    lines += [
        f"| {label} | {' | '.join(_number(part['carried']) for part in result['by_position'])} |"
        for label, result in zip(labels, results, strict=True)
    ]
    return "\n".join(lines)


def _by_distance(result: dict[str, Any], memory: str) -> np.ndarray:
    """Rows (distance, loss) of the bins that have targets, at the middle of each on a logarithmic axis."""
    bins = [each for each in result["by_distance"] if each["targets"]]
    rows = [(np.sqrt((each["first"] + 1) * each["end"]), each[memory]) for each in bins]
    return np.array(rows).reshape(-1, 2)  # also where there are none


def draw(results: Sequence[dict[str, Any]]) -> Figure:
    """Four panels: the loss with and without memory, by position in the block, by distance, and by distance less that
    of the first run (of a single run: carried less cleared)."""
    figure = Figure(figsize=(15, 9), layout="constrained")
    (totals, by_position), (by_distance, by_gain) = figure.subplots(2, 2)
    names = run_labels(results)
    styles = line_styles(names)
    alone = len(results) == 1
    for i, (name, result) in enumerate(zip(names, results)):
        style = {**styles[name], "markersize": 5}
        totals.plot([0, 1], [result["carried"], result["cleared"]], label=name, **style)
        places = [part["first"] for part in result["by_position"]]
        by_position.plot(places, [part["carried"] for part in result["by_position"]], **style)
        carried, cleared = (_by_distance(result, memory) for memory in ("carried", "cleared"))
        by_distance.plot(*carried.T, **style)
        reference = cleared if alone else _by_distance(results[0], "carried")
        # Runs that read other tokens have other bins; they are not subtracted.
        if (
            reference.shape == carried.shape
            and np.array_equal(reference[:, 0], carried[:, 0])
            and (alone or i)
        ):
            by_gain.plot(carried[:, 0], carried[:, 1] - reference[:, 1], **style)
    first = results[0]
    for axes in (by_distance, by_gain):
        for name, dashes in (("reach", "--"), ("history", ":")):
            axes.axvline(first[name] + 1, color="#999999", linestyle=dashes, label=name)
        axes.set_xscale("log", base=2)
        plain_log_axis(axes.xaxis)
        axes.set_xlabel("tokens back to the last occurrence")
    by_gain.axhline(0, color="#999999", linewidth=0.8)
    totals.set(ylabel="loss, nats a token", title="memory", xticks=[0, 1], xlim=(-0.5, 1.5))
    totals.set_xticklabels(["carried", "cleared at every row"])
    by_position.set(
        xlabel="position in the block", ylabel="loss, nats a token", title="by position, memory carried"
    )
    by_distance.set(ylabel="loss, nats a token", title="by distance, memory carried")
    by_gain.set(
        ylabel="difference of the loss, nats",
        title="carried less cleared" if alone else f"less that of {names[0]}",
    )
    for axes in (totals, by_position, by_distance, by_gain):
        axes.grid(True, alpha=0.3)
    by_distance.legend(frameon=False)
    shared_legend(figure, totals)
    return figure
