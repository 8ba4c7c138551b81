"""Breaks the library one line at a time and shows which faults the tests notice.

    python -m tests.mutants [--list] [--only TEXT ...] [--jobs N]

For each mutant of `tests.mutants.table`, a copy of the repository gets one line changed and runs the tests that the
table names for it. A mutant that no test fails for has survived; the command then exits with status 1, as it does for a
mutant whose place in the code is not found exactly once. The suite itself does not run this: it takes half an hour.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import queue
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from tests.mutants.table import MUTANTS, Mutant

ROOT = Path(__file__).parents[2]
_COPIED = ("brl_jax", "pallas_kernels", "train", "eval", "tests", "pyproject.toml", "README.md", "docs")


def copy_of_the_repository(folder: Path) -> Path:
    """The parts of the repository that tests need, under `folder`."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, folder / name)
    return folder


def places(mutant: Mutant, root: Path = ROOT) -> int:
    """How many times the mutant's old text stands in its file; 0 where there is no such file."""
    path = root / mutant.path
    return path.read_text().count(mutant.old) if path.exists() else 0


def outcome(mutant: Mutant, root: Path) -> str:
    """Killed, survived, or why it could not be tried; the copy under `root` is as before afterwards."""
    if places(mutant, root) != 1:
        return f"NO PLACE: {places(mutant, root)} in {mutant.path}"
    path = root / mutant.path
    original = path.read_text()
    path.write_text(original.replace(mutant.old, mutant.new))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n", "0", "-p", "no:cacheprovider", "-m", ""]
    try:
        done = subprocess.run(
            [*command, *mutant.tests],
            cwd=root,
            env=os.environ | {"PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
    finally:
        path.write_text(original)
    match done.returncode:
        case 0:
            return "SURVIVED"
        case 1:
            return "killed"
        case 5:
            return "SURVIVED: no test has this name"
        case status:
            return f"NOT RUN: pytest ended with status {status}"


def main(argv: Sequence[str]) -> int:
    """Runs the mutants that are asked for; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument(
        "--list", action="store_true", help="names the mutants and whether each has its place"
    )
    parser.add_argument(
        "--only", nargs="+", default=[""], metavar="TEXT", help="mutants whose names contain it"
    )
    parser.add_argument("--jobs", type=int, default=1, help="how many to try at a time")
    options = parser.parse_args(argv)
    chosen = [m for m in MUTANTS if any(text in m.name for text in options.only)]
    if options.list:
        lost = False
        for mutant in chosen:
            missing = [
                test for test in mutant.tests if test.startswith("tests/") and not (ROOT / test).exists()
            ]
            print(
                f"{places(mutant)}  {mutant.name}  ({mutant.path})", *(f"MISSING {test}" for test in missing)
            )
            lost |= bool(missing) or places(mutant) != 1
        return int(lost)

    with tempfile.TemporaryDirectory() as folder:
        copies: queue.Queue[Path] = queue.Queue()
        for job in range(options.jobs):
            copies.put(copy_of_the_repository(Path(folder) / str(job)))

        def one(mutant: Mutant) -> tuple[Mutant, str, float]:
            if mutant.equivalent:
                return mutant, f"equivalent: {mutant.equivalent}", 0.0
            root, start = copies.get(), time.monotonic()
            try:
                return mutant, outcome(mutant, root), time.monotonic() - start
            finally:
                copies.put(root)

        results = []
        with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
            for mutant, result, seconds in pool.map(one, chosen):
                results.append(result)
                print(f"{seconds:5.0f} s  {mutant.name}: {result}", flush=True)
    killed, equivalent = (sum(r.startswith(word) for r in results) for word in ("killed", "equivalent"))
    print(f"{killed} killed, {len(results) - killed - equivalent} not, {equivalent} equivalent")
    return int(killed + equivalent < len(results))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
