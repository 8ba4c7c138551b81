"""Times attention side by side: python -m eval.speed.

Six levels: the bare attention functions beside PyTorch's, one transformer layer of each listed mechanism, and,
where --levels asks for them, whole encoders that only infer, beside the same network in PyTorch, classifiers of the
Long Range Arena, whose table shows steps a second and memory beside full attention's (TransNormer's table 7:
--levels classifiers --lengths 1024 2048 3072 4096 5120 --heads 2 --head_dim 32), and training steps of encoder-decoders
that copy (BRL-Attention's figure 5: --levels encoder_decoders --lengths 200 500 1000 2000), and decoders, inference and
training steps (its tables 6 and 7: --levels decoders --heads 8 --lengths 128 256 512 1024 2048 3072 4096).
Every candidate is checked before it is timed (functions against a float64 reference on a sample of rows; of
layers that results are finite and that decoding gives what the forward pass gives): a wrong result gets no number.
Then all are timed in turn, round by round: forward, forward with backward, and a decoding step. The tables show
the fastest round, how many times as fast that is as the base of the same rounds (PyTorch's full causal attention
for functions, or this package's where PyTorch is not installed; a layer of full attention for layers), tokens per
second, the temporary memory of the compiled program, and the size of the decoding state. Ctrl-C or SIGTERM prints,
writes and draws what was measured so far. With --generation it times a whole network: eval/speed/generation.py.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from eval.harness.output import json_path, make_folder
from eval.speed import (
    classifiers,
    decoders,
    encoder_decoders,
    encoders,
    functions,
    generation,
    layers,
    report,
)
from eval.speed.measure import measure
from eval.speed.options import Level, SpeedOptions
from eval.speed.pictures import draw
from train.config import parse_options
from train.errors import RunError, command

LEVELS = {
    "functions": functions.cases,
    "layers": layers.cases,
    "encoders": encoders.cases,
    "classifiers": classifiers.cases,
    "encoder_decoders": encoder_decoders.cases,
    "decoders": decoders.cases,
}


def main(argv: Sequence[str]) -> None:
    """Prints the tables; see the module's text and --help."""
    if "--generation" in argv:
        return generation.run([argument for argument in argv if argument != "--generation"])
    options = parse_options(
        SpeedOptions(),
        argv,
        prog="python -m eval.speed",
        about="Times attention, functions and layers, side by side. With --generation: a whole network that generates, "
        "see --generation --help.",
    )
    path = json_path(options.json)
    pictures = None if options.pictures is None else Path(options.pictures)
    if pictures is not None:
        make_folder(pictures)
    console = Console()
    compared = set(options.levels) & {"functions", "encoders"}
    if compared and options.torch and not functions.has_torch(options):
        console.print("PyTorch is not installed: no rows for it; ratios are to this package's full attention")
    measured: dict[Level, list[dict]] = {level: [] for level in options.levels}
    # A scheduler's SIGTERM must not lose an hour's measurements.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            for level, rows in measured.items():
                for length in options.lengths:
                    measure(
                        LEVELS[level](options, length),
                        length,
                        rows,
                        progress,
                        label=level,
                        repeats=options.repeats,
                        patience=options.patience,
                        limit=options.limit,
                    )
    finally:
        signal.signal(signal.SIGTERM, before)
        _report(measured, options, console, path, pictures)
    wrong = [
        f"{row['name']} at n = {row['length']}"
        for rows in measured.values()
        for row in rows
        if "WRONG" in row["note"]
    ]
    if wrong:
        raise RunError(f"wrong results: {', '.join(wrong)}")


def _report(
    measured: dict[Level, list[dict]],
    options: SpeedOptions,
    console: Console,
    path: Path | None,
    pictures: Path | None,
) -> None:
    rows: list[dict] = []
    for level, found in measured.items():
        completed = report.complete(found, level, options)
        rows += completed
        if completed:
            console.print(*report.as_tables(completed, level, options))
    fitted = report.exponent_table(report.exponents(rows, options.fit_from), options)
    if fitted is not None:
        console.print(fitted)
    for line in report.note_lines(rows) + report.target_lines(rows, options):
        console.print(line, highlight=False, soft_wrap=True)
    if path is not None:
        report.write_json(path, rows, options, exponents=report.exponents(rows, options.fit_from))
    if pictures is not None:
        for picture in draw(rows, options.fit_from, pictures):
            console.print(f"drew {picture}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    sys.exit(command(main, "eval.speed"))
