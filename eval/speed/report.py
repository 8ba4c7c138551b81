"""What eval.speed reports about its measurements: ratios, fitted exponents, tables, JSON."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from etils import epath
from rich.console import Console
from rich.table import Table as RichTable

from eval.harness.output import json_path
from eval.harness.table import Table, fitted_exponent
from eval.speed.levels import LEVELS, base_name
from eval.speed.options import MeasureOptions, SpeedOptions
from eval.speed.pictures import draw
from train.engine.storage import check_writable, write_whole

PROGRAMS = {"forward": "fwd", "forward_backward": "fwd+bwd", "step": "step", "train": "train"}


def complete(rows: Sequence[dict], level: str, options: SpeedOptions) -> list[dict]:
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


def as_tables(rows: Sequence[dict], level: str, options: SpeedOptions) -> list[RichTable]:
    """The rows of a level: times and ratios, then throughput and memory; each fits in 80 columns."""
    size = f"batch {options.batch}, {options.heads} heads of {options.head_dim}, {options.dtype}"
    base = base_name(level, options)
    programs = {name: short for name, short in PROGRAMS.items() if any(f"{name}_s" in row for row in rows)}
    trains = "train" in programs
    rate = "steps" if trains else "tokens"
    # The field, its unit and the digits behind the point of each column.
    times: dict[str, tuple[str, float, int | None]] = {}
    rest: dict[str, tuple[str, float, int | None]] = {}
    for name, short in programs.items():
        times[f"{short} ms"] = (f"{name}_s", 1e-3, None)
        times[f"{short} x {base}"] = (f"{name}_ratio", 1.0, 2)
        rest[f"{short} {rate}/s"] = (f"{name}_{rate}_per_s", 1.0, None)
    for name, short in programs.items():
        if name != "step":
            rest[f"{short} temp MiB"] = (f"{name}_temp_bytes", 2.0**20, None)
    if "step" in programs:
        rest["state MiB"] = ("state_bytes", 2.0**20, None)
    if trains:
        rest["forward GFLOP"] = ("flops", 1e9, None)
        rest["train MiB"] = ("train_bytes", 2.0**20, None)
        rest[f"train MiB / {base}"] = ("train_bytes_ratio", 1.0, 2)
    tables = []
    for title, columns in {"time": times, "throughput and memory": rest}.items():
        what = f"{LEVELS[level].title.format(options)}: {title}\n{size}, on {jax.devices()[0].device_kind}"
        table = Table("n", "case", *(columns or ["note"]), title=what)
        for row in rows:
            cells = [cell(row, *column) for column in columns.values()]
            if row["note"]:
                cells = [row["note"].partition(":")[0], *["-"] * (len(columns) - 1)]
            name = row["name"] if row.get("causal", True) else f"{row['name']} *"
            table.add(row["length"], name, *cells)
        tables.append(table.for_terminal(left=2, sections=True))
    return tables


def cell(row: dict, field: str, unit: float, digits: int | None = None) -> str | None:
    """A field in a unit; without digits behind the point three that count."""
    value = row.get(field)
    if value is None:
        return None
    value /= unit
    if digits is not None:
        return f"{value:.{digits}f}"
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def exponent_table(fitted: Sequence[dict[str, Any]], options: SpeedOptions) -> RichTable | None:
    """The `exponents` of all cases that have any; None if no case has."""
    kinds = {"s": "time", "temp_bytes": "temp memory"}
    titles = {
        f"{name}_{unit}": f"{PROGRAMS[name]} {word}" for unit, word in kinds.items() for name in PROGRAMS
    }
    columns = {name: title for name, title in titles.items() if any(e[name] is not None for e in fitted)}
    columns.pop("step_temp_bytes", None)
    known = [entry for entry in fitted if any(entry[column] is not None for column in columns)]
    if not known:
        return None
    many = sum(n >= options.fit_from for n in set(options.lengths)) > 1
    span = [n for n in options.lengths if n >= options.fit_from] if many else list(options.lengths)
    title = f"growth with n: fitted exponents, n = {min(span)} to {max(span)}"
    table = Table("level", "case", *columns.values(), title=title)
    for entry in known:
        values = (None if entry[c] is None else f"{round(entry[c], 2) + 0.0:.2f}" for c in columns)
        table.add(entry["level"], entry["name"], *values)
    return table.for_terminal(left=2)


def note_lines(rows: Sequence[dict]) -> list[str]:
    """Why some rows have no numbers, and what a star means."""
    lines = [
        f"{row['level']}, {row['name']} at n = {row['length']}: {row['note']}" for row in rows if row["note"]
    ]
    if any(not row.get("causal", True) for row in rows):
        lines.append("* no causal form: measured in both directions")
    return lines


def check_outputs(options: MeasureOptions) -> None:
    """Makes the folder of the pictures. Raises UserError if it or the JSON file cannot be written."""
    json_path(options.json)
    if options.pictures is not None:
        check_writable("--pictures", options.pictures)
        Path(options.pictures).mkdir(parents=True, exist_ok=True)


def publish(
    rows: Sequence[dict], options: MeasureOptions, console: Console, fit_from: int, **fitted: Any
) -> None:
    """Prints the notes of all rows. Writes options, rows and what was fitted to them as one JSON object, and draws the
    pictures, if the options name places for them."""
    for line in note_lines(rows):
        console.print(line, highlight=False, soft_wrap=True)
    if options.json is not None:
        result = {
            "options": dataclasses.asdict(options),
            "device": jax.devices()[0].device_kind,
            "rows": list(rows),
            **fitted,
        }
        write_whole(epath.Path(options.json), json.dumps(result, indent=1) + "\n")
    for picture in draw(rows, fit_from, Path(options.pictures)) if options.pictures is not None else ():
        console.print(f"drew {picture}", highlight=False, soft_wrap=True)
