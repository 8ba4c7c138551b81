"""Times attention side by side: python -m eval.speed.

Every candidate is checked before it is timed: functions against a float64 reference on a sample of rows, layers for
finite results and for decoding that gives what the forward pass gives. The tables show the fastest round and how many
times as fast it is as the base. Ctrl-C or SIGTERM prints, writes and draws what was measured so far.

With --generation the command times a whole network that generates (`eval.speed.generation`), and with --tracing what
calls cost before they run (`eval.speed.tracing`).
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from eval.speed import generation, report, tracing
from eval.speed.functions import has_torch
from eval.speed.levels import LEVELS, CheckedOptions
from eval.speed.measure import measure, sigterm_interrupts
from eval.speed.options import SpeedOptions
from train.cli.command import start
from train.cli.options import parse_options
from train.engine.errors import RunError


def main(argv: Sequence[str]) -> None:
    if "--generation" in argv:
        return generation.run([argument for argument in argv if argument != "--generation"])
    if "--tracing" in argv:
        return tracing.run([argument for argument in argv if argument != "--tracing"])
    options = parse_options(
        CheckedOptions(),
        argv,
        prog="python -m eval.speed",
        about="Times attention, functions and layers, side by side. With --generation: a whole network that generates, "
        "see --generation --help.",
    )
    report.check_outputs(options)
    console = Console()
    if options.torch and not has_torch(options) and any(LEVELS[level].has_torch for level in options.levels):
        console.print("PyTorch is not installed: no rows for it; ratios are to this package's full attention")
    measured: dict[str, list[dict]] = {level: [] for level in options.levels}
    try:
        with sigterm_interrupts():
            for level, rows in measured.items():
                for length in options.lengths:
                    cases = LEVELS[level].cases(options, length)
                    measure(cases, length, rows, label=level, **options.limits)
    finally:
        _report(measured, options, console)
    wrong = [
        f"{row['name']} at n = {row['length']}"
        for rows in measured.values()
        for row in rows
        if "WRONG" in row["note"]
    ]
    if wrong:
        raise RunError(f"wrong results: {', '.join(wrong)}")


def _report(measured: dict[str, list[dict]], options: SpeedOptions, console: Console) -> None:
    rows: list[dict] = []
    for level, found in measured.items():
        completed = report.complete(found, level, options)
        rows += completed
        for table in report.as_tables(completed, level, options) if completed else ():
            console.print(table)
    exponents = report.exponents(rows, options.fit_from)
    fitted = report.exponent_table(exponents, options)
    if fitted is not None:
        console.print(fitted)
    report.publish(rows, options, console, options.fit_from, exponents=exponents)


if __name__ == "__main__":
    start(main, "eval.speed")
