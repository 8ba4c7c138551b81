"""What eval.speed reports of its measurements: ratios, fitted exponents, tables, targets, JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
from etils import epath
from rich import box
from rich.table import Table

from eval.speed.encoders import NUM_LAYERS
from eval.speed.functions import TORCH, has_torch
from eval.speed.options import Level, SpeedOptions
from train.engine.storage import write_whole

PROGRAMS = {"forward": "fwd", "forward_backward": "fwd+bwd", "step": "step", "train": "train"}


def base_name(level: str, options: SpeedOptions) -> str:
    """The row that the others of its level and length are compared with."""
    return TORCH if level in ("functions", "encoders") and has_torch(options) else "full"


def complete(rows: Sequence[dict], level: Level, options: SpeedOptions) -> list[dict]:
    """The rows of a level with what follows from them: ratios to the base's time, tokens per second."""
    bases = {row["length"]: row for row in rows if row["name"] == base_name(level, options)}
    done = []
    for row in rows:
        row = {"level": level, **row}
        for program in PROGRAMS:
            seconds = row.get(f"{program}_s")
            if f"{program}_s" not in row:
                continue
            base = bases.get(row["length"], {}).get(f"{program}_s")
            tokens = options.batch * (1 if program == "step" else row["length"])
            row[f"{program}_ratio"] = base / seconds if base and seconds else None
            row[f"{program}_steps_per_s"] = 1 / seconds if seconds else None
            row[f"{program}_tokens_per_s"] = tokens / seconds if seconds else None
        own, base = (r.get("train_bytes") for r in (row, bases.get(row["length"], {})))
        if own:
            row["train_bytes_ratio"] = own / base if base else None
        done.append(row)
    return done


def fitted_exponent(rows: Sequence[dict], what: str, fit_from: int) -> float | None:
    """Slope of log(row[what]) over log(length), by least squares over lengths of at least `fit_from`.

    All lengths count where that leaves fewer than two; None where there are fewer than two in all.
    """
    points = [(row["length"], row[what]) for row in rows if row.get(what)]
    long = [point for point in points if point[0] >= fit_from]
    points = long if len({n for n, _ in long}) > 1 else points
    if len({n for n, _ in points}) < 2:
        return None
    lengths, values = np.log(np.asarray(points, np.float64)).T
    return float(np.polyfit(lengths, values, 1)[0])


def exponents(rows: Sequence[dict], fit_from: int) -> list[dict[str, Any]]:
    """For each case of each level, the powers of the length that its times and its memory grow with."""
    kinds = [f"{program}_{unit}" for program in PROGRAMS for unit in ("s", "temp_bytes")]
    cases = dict.fromkeys((row["level"], row["name"]) for row in rows)
    fitted = []
    for level, name in cases:
        own = [row for row in rows if (row["level"], row["name"]) == (level, name) and not row["note"]]
        found = {kind: fitted_exponent(own, kind, fit_from) for kind in kinds}
        fitted.append({"level": level, "name": name, **found})
    return fitted


def as_tables(rows: Sequence[dict], level: Level, options: SpeedOptions) -> list[Table]:
    """The rows of a level: times and ratios, then throughput and memory; each fits in 80 columns."""
    size = f"batch {options.batch}, {options.heads} heads of {options.head_dim}, {options.dtype}"
    what = {
        "functions": f"causal attention functions, window {options.window}",
        "layers": f"one transformer layer of width {options.heads * options.head_dim}",
        "encoders": f"encoders of {NUM_LAYERS} layers of width {options.heads * options.head_dim}",
        "classifiers": f"classifiers of width {options.heads * options.head_dim}, inference and training",
        "encoder_decoders": f"encoder-decoders of width {options.heads * options.head_dim}, training",
        "decoders": f"decoders of width {options.heads * options.head_dim}, inference and training",
    }[level]
    base = base_name(level, options)
    programs = [name for name in PROGRAMS if any(f"{name}_s" in row for row in rows)]
    times: dict[str, Callable[[dict], str]] = {}
    rates: dict[str, Callable[[dict], str]] = {}
    memory: dict[str, Callable[[dict], str]] = {}
    for name in programs:
        short = PROGRAMS[name]
        times[f"{short} ms"] = functools.partial(_cell, field=f"{name}_s", unit=1e-3)
        times[f"{short} x {base}"] = functools.partial(_cell, field=f"{name}_ratio", digits=2)
        rate = "steps" if "train" in programs else "tokens"
        rates[f"{short} {rate}/s"] = functools.partial(_cell, field=f"{name}_{rate}_per_s")
        memory[f"{short} temp MiB"] = functools.partial(_cell, field=f"{name}_temp_bytes", unit=2**20)
    memory.pop("step temp MiB", None)
    if "step" in programs:
        memory["state MiB"] = functools.partial(_cell, field="state_bytes", unit=2**20)
    if "train" in programs:
        memory["train MiB"] = functools.partial(_cell, field="train_bytes", unit=2**20)
        memory[f"train MiB / {base}"] = functools.partial(_cell, field="train_bytes_ratio", digits=2)
    return [
        _table(f"{what}: {title}\n{size}, on {jax.devices()[0].device_kind}", rows, columns)
        for title, columns in {"time": times, "throughput and memory": rates | memory}.items()
    ]


def _table(title: str, rows: Sequence[dict], columns: dict[str, Callable[[dict], str]]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1), collapse_padding=True, pad_edge=False)
    table.add_column("n", justify="right", no_wrap=True)
    table.add_column("case", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", min_width=7)
    last = None
    for row in rows:
        if row["length"] != last:
            table.add_section()
            last = row["length"]
        name = row["name"] if row.get("causal", True) else f"{row['name']} *"
        cells = [show(row) for show in columns.values()]
        if row["note"]:
            cells = [row["note"].partition(":")[0], *["-"] * (len(columns) - 1)]
        table.add_row(str(row["length"]), name, *cells)
    return table


def _cell(row: dict, *, field: str, unit: float = 1.0, digits: int | None = None) -> str:
    value = row.get(field)
    if value is None:
        return "-"
    value /= unit
    if digits is not None:
        return f"{value:.{digits}f}"
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def exponent_table(fitted: Sequence[dict], options: SpeedOptions) -> Table | None:
    """The fitted exponents; None where no case was measured at two lengths."""
    titles = {
        "forward_s": "fwd time",
        "forward_backward_s": "fwd+bwd time",
        "step_s": "step time",
        "train_s": "train time",
        "forward_temp_bytes": "fwd temp memory",
        "forward_backward_temp_bytes": "fwd+bwd temp memory",
        "train_temp_bytes": "train temp memory",
    }
    columns = [column for column in titles if any(entry[column] is not None for entry in fitted)]
    known = [entry for entry in fitted if any(entry[column] is not None for column in columns)]
    if not known:
        return None
    many = sum(n >= options.fit_from for n in set(options.lengths)) > 1
    span = [n for n in options.lengths if n >= options.fit_from] if many else list(options.lengths)
    table = Table(
        title=f"growth with n: fitted exponents, n = {min(span)} to {max(span)}",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("level", no_wrap=True)
    table.add_column("case", no_wrap=True)
    for column in columns:
        table.add_column(titles[column], justify="right")
    for entry in known:
        values = ["-" if entry[c] is None else f"{round(entry[c], 2) + 0.0:.2f}" for c in columns]
        table.add_row(entry["level"], entry["name"], *values)
    return table


class Target(NamedTuple):
    """The least speed of one row relative to another of its level, at the default options."""

    length: int
    name: str
    base: str
    program: str
    least: float
    level: Level = "functions"


TARGETS = (
    Target(8192, "local", TORCH, "forward", 6.0),
    Target(8192, "local", TORCH, "forward_backward", 8.0),
    Target(32768, "local", TORCH, "forward", 20.0),
    Target(4096, "mlr", "full", "forward", 1.0),
    Target(8192, "mlr", "full", "forward", 1.0),
    Target(4096, "mlr", "mlr_dense", "forward", 3.0),
    Target(4096, "deltanet", "linear", "forward", 1 / 3),
    Target(4096, "deltanet", "linear", "forward_backward", 1 / 3),
    Target(4096, "gated_deltanet", "deltanet", "forward", 1 / 1.3),
    Target(4096, "gated_deltanet", "deltanet", "forward_backward", 1 / 1.3),
    Target(4096, "kda", "deltanet", "forward", 1 / 2),
    Target(4096, "kda", "deltanet", "forward_backward", 1 / 2),
    Target(4096, "deltanet", "deltanet_scan", "forward", 10.0),
    Target(4096, "deltanet", "deltanet_scan", "forward_backward", 10.0),
    *(
        Target(65536, f"brl w {w} m {m}", TORCH, "forward", 13.0, "encoders")
        for w in (256, 512)
        for m in (64, 128)
    ),
)


def target_lines(rows: Sequence[dict], options: SpeedOptions) -> list[str]:
    """How rows stand against their targets, where both sides were measured at that length."""
    default = SpeedOptions()
    same = ("window", "heads", "head_dim", "batch", "dtype")
    if any(getattr(options, n) != getattr(default, n) for n in same):
        return []
    times = {(row["level"], row["length"], row["name"]): row for row in rows}
    lines = []
    for length, name, base, program, least, level in TARGETS:
        own, other = (times.get((level, length, n), {}).get(f"{program}_s") for n in (name, base))
        if own and other:
            verdict = "met" if other / own >= least else "NOT met"
            lines.append(
                f"n = {length}, {PROGRAMS[program]}: {name} is {other / own:.2f} times as fast as {base}; "
                f"target {least:.2f}: {verdict}"
            )
    return lines


def note_lines(rows: Sequence[dict]) -> list[str]:
    """Why some rows have no numbers, and what a star means."""
    lines = [
        f"{row['level']}, {row['name']} at n = {row['length']}: {row['note']}" for row in rows if row["note"]
    ]
    if any(not row.get("causal", True) for row in rows):
        lines.append("* no causal form: measured in both directions")
    return lines


def write_json(path: Path, rows: Sequence[dict], options: Any, **fitted: Any) -> None:
    """Options, rows and what was fitted to them as one JSON object; written aside and then renamed."""
    result = {
        "options": dataclasses.asdict(options),
        "device": jax.devices()[0].device_kind,
        "rows": list(rows),
        **fitted,
    }
    write_whole(epath.Path(path), json.dumps(result, indent=1) + "\n")
