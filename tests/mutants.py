"""Breaks the code one expression at a time and lists the faults that no test notices.

    python -m tests.mutants brl_jax/decoding.py train/data [--seed S] [--count N] [--tests PATH ...] [--timeout SECONDS]

Draws N mutants by the seed from the syntax trees of the rooms (folders or files): comparisons, arithmetic, constants
off by one, dropped statements, swapped arguments, min for max, `and` for `or`. First the tests that mirror the rooms,
with the laws and bad calls for the library's rooms, must pass on the code as it is. That run notes which lines each
test executes, so that a mutant meets only the tests that reach it, the quickest first, until one fails.

A mutant that no test notices is printed with its place and the change; the exit status is 1 if more than one in ten
lives. Whether a survivor computes the same as the original is for the reader to judge.
"""

from __future__ import annotations

import argparse
import ast
import copy
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
_LIBRARY = (
    "brl_jax/attention",
    "brl_jax/layers",
    "brl_jax/models",
    "pallas_kernels/tpu",
)  # what the laws run
_BAD_CALLS = Path("tests/bad_input/test_calls.py")  # what the whole library refuses
_PROCESSES = (
    "devices",
    "train.lm",
)  # groups of tests whose work another process does, unseen by the recorder

_SWAPS: dict[type, type] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Add: ast.Sub, ast.Sub: ast.Add,
    ast.Mult: ast.Add, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv, ast.Pow: ast.Mult,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
_PAIRS = (("min", "max"), ("minimum", "maximum"), ("argmin", "argmax"), ("any", "all"), ("ceil", "floor"))
_NAMES = dict(_PAIRS) | {b: a for a, b in _PAIRS}
_SKIPPED = ("annotation", "returns", "decorator_list", "bases", "msg")  # changing these changes no result


class Mutant(NamedTuple):
    """One fault: `old`, at the offsets [start, end) of the file's bytes, becomes `new`."""

    path: str
    line: int
    lines: range  # of the statement, up to the end of what changes
    imported: bool  # outside of functions, so that it runs when the file is imported
    start: int
    end: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split()) for text in (self.old, self.new))
        return f"{self.path}:{self.line}  {old}  ->  {new}"


def _changes(node: ast.AST) -> Iterator[ast.AST]:
    """Other nodes to put where this one is."""

    def changed(**fields: Any) -> ast.AST:
        new = copy.copy(node)
        for name, value in fields.items():
            setattr(new, name, value)
        return new

    match node:
        case ast.Compare(ops=[first, *others]) if type(first) in _SWAPS:
            yield changed(ops=[_SWAPS[type(first)](), *others])
        case ast.BinOp(op=op) | ast.BoolOp(op=op) if type(op) in _SWAPS:
            yield changed(op=_SWAPS[type(op)]())
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            yield operand
        case ast.Constant(value=bool(value)):
            yield changed(value=not value)
        case ast.Constant(value=int(value) | float(value)):
            yield changed(value=value + 1)
            yield changed(value=value - 1)
        case ast.Name(id=name) if name in _NAMES:
            yield changed(id=_NAMES[name])
        case ast.Attribute(attr=name) if name in _NAMES:
            yield changed(attr=_NAMES[name])
        case ast.Call(args=[first, second, *others]) if not {type(first), type(second)} & {ast.Starred}:
            yield changed(args=[second, first, *others])
        case ast.AugAssign(op=op) if type(op) in _SWAPS:
            yield changed(op=_SWAPS[type(op)]())
            yield ast.Pass()
        case ast.Raise() | ast.Expr(value=ast.Call()):
            yield ast.Pass()


def mutants_of(path: str, text: str) -> list[Mutant]:
    """Every mutant of a file."""
    starts = [0]
    for line in text.encode().splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []

    def visit(node: ast.AST, statement: int, imported: bool) -> None:
        if isinstance(node, ast.stmt):
            statement = node.lineno
        for new in _changes(node):
            start, end = (
                starts[line - 1] + offset
                for line, offset in ((node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset))
            )
            old, written = text.encode()[start:end].decode(), ast.unparse(new)
            if isinstance(node, ast.BinOp | ast.BoolOp | ast.Compare | ast.Constant):
                written = f"({written})"
            lines = range(statement, node.end_lineno + 1)
            found.append(Mutant(path, node.lineno, lines, imported, start, end, old, written))
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Import | ast.ImportFrom):
            return
        for name, value in ast.iter_fields(node):
            if name not in _SKIPPED:
                for child in value if isinstance(value, list) else [value]:
                    if isinstance(child, ast.AST):
                        visit(
                            child, statement, imported and (not isinstance(node, functions) or name != "body")
                        )

    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    visit(ast.parse(text), 1, True)
    return found


def draw(rooms: Sequence[str], seed: int, count: int, root: Path = ROOT) -> list[Mutant]:
    """At most `count` mutants of the rooms, on different lines."""
    by_line = defaultdict(list)
    for room in rooms:
        path = root / room
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for mutant in mutants_of(file.relative_to(root).as_posix(), file.read_text()):
                by_line[mutant.path, mutant.line].append(mutant)
    rng = random.Random(seed)
    lines = rng.sample(sorted(by_line), min(count, len(by_line)))
    return [rng.choice(by_line[line]) for line in sorted(lines)]


def mirror_of(rooms: Sequence[str], root: Path = ROOT) -> list[str]:
    """The tests that mirror the rooms: files of the same name, else the folder's; the laws; bad calls."""
    found = set()
    for room in rooms:
        path = Path(room)
        parts = path.with_suffix("").parts
        mirror = Path("tests", *(parts[1:] if parts[0] == "brl_jax" else parts))
        if (root / mirror).is_dir():
            found.add(mirror)
        elif named := sorted((root / mirror.parent).glob(f"test_{mirror.name}*.py")):
            found.update(file.relative_to(root) for file in named)
        else:
            found.add(next(p for p in mirror.parents if (root / p).is_dir()))
        if path.as_posix().startswith(_LIBRARY):
            found.add(Path("tests/laws"))
        if parts[0] == "brl_jax" and (root / _BAD_CALLS).exists():
            found.add(_BAD_CALLS)
    return sorted(path.as_posix() for path in found if not found & set(path.parents))


class Recorder:
    """A plugin for pytest that writes which lines of the rooms each unit of tests executes, and for how long.

    A unit is a file, or a group of tests that share compiled programs: a later test of a unit runs code that only the
    first one traces. Between units nothing that JAX has traced is kept.
    """

    def __init__(self, out: str, rooms: Sequence[str]) -> None:
        self.out, self.rooms = Path(out), tuple(str(Path.cwd() / room) for room in rooms)
        self.names: dict[Any, str] = {}
        self.unit = ""
        self.units: dict[str, Any] = defaultdict(
            lambda: {"tests": [], "seconds": 0.0, "process": False, "lines": defaultdict(set)}
        )

    def trace(self, frame: Any, event: str, argument: Any) -> Any:
        code = frame.f_code
        if code not in self.names:
            path = code.co_filename
            self.names[code] = os.path.relpath(path) if path.startswith(self.rooms) else ""
        if not self.names[code]:
            return None
        lines = self.units[self.unit]["lines"][self.names[code]]

        def line(frame: Any, event: str, argument: Any) -> Any:
            lines.add(frame.f_lineno)
            return line

        return line(frame, event, argument)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: Any) -> Any:
        marker = item.get_closest_marker("xdist_group")
        group = marker and (marker.args[0] if marker.args else marker.kwargs["name"])
        unit = f"{item.nodeid.partition('::')[0]} {group or ''}"
        if unit != self.unit and "jax" in sys.modules:
            sys.modules["jax"].clear_caches()
        self.unit = unit
        start = time.monotonic()
        sys.settrace(self.trace)
        try:
            return (yield)
        finally:
            sys.settrace(None)
            own = self.units[unit]
            own["tests"].append(item.nodeid)
            own["seconds"] += time.monotonic() - start
            own["process"] |= group in _PROCESSES

    def pytest_sessionfinish(self) -> None:
        self.out.write_text(json.dumps(self.units, default=sorted))


def pytest_configure(config: Any) -> None:
    """Registers the recorder where this module is loaded as a plugin."""
    if out := os.environ.get("MUTANTS_OUT"):
        config.pluginmanager.register(Recorder(out, os.environ["MUTANTS_ROOMS"].split(os.pathsep)))


def copy_of_the_repository(root: Path, folder: Path) -> None:
    """Copies what git tracks, or would track."""
    line = ["git", "ls-files", "-co", "--exclude-standard", "-z"]
    for name in subprocess.run(line, cwd=root, capture_output=True, text=True, check=True).stdout.split("\0"):
        if name and (root / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / name, folder / name)


def run(folder: Path, arguments: Sequence[str], limit: float | None = None, **environment: str) -> str:
    """Runs tests up to the first that fails: what pytest says of a failure, or nothing."""
    line = [sys.executable, "-m", "pytest", "-x", "-q", *arguments]
    paths = os.pathsep.join([str(folder), str(Path(__file__).parent)])
    environment = {**os.environ, "PYTHONPATH": paths, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    try:
        done = subprocess.run(
            line, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit, check=False
        )
    except subprocess.TimeoutExpired:
        return "timeout"
    return f"{done.stdout[-3000:]}{done.stderr[-1000:]}" if done.returncode else ""


def outcome(mutant: Mutant, units: dict[str, Any], folder: Path, patience: float) -> str:
    """Tries a mutant in the copy under `folder`, which is as before afterwards: "killed", or that it lives.

    The units that execute its lines run first, the quickest of them at the beginning; for code that runs when it is
    imported, the units that execute anything of its file. Tests whose work another process does run last.
    """
    reached = [unit for unit in units.values() if set(unit["lines"].get(mutant.path, ())) & set(mutant.lines)]
    if mutant.imported:
        reached = [unit for unit in units.values() if mutant.path in unit["lines"]]
    reached.sort(key=lambda unit: unit["seconds"])
    unseen = [unit for unit in units.values() if unit["process"] and unit not in reached]
    file = folder / mutant.path
    original = file.read_bytes()
    file.write_bytes(original[: mutant.start] + mutant.new.encode() + original[mutant.end :])
    try:
        for chosen in filter(None, (reached, unseen)):
            tests = [test for unit in chosen for test in unit["tests"]]
            limit = patience + 3 * sum(unit["seconds"] for unit in chosen)
            if run(folder, tests, limit):
                return "killed"
    finally:
        file.write_bytes(original)
    return "LIVES" if reached or unseen else "LIVES, no test runs it:"


def main(argv: Sequence[str] | None = None, root: Path = ROOT) -> int:
    """Draws the mutants, tries them and prints what lives; the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument(
        "rooms", nargs="+", metavar="ROOM", help="a folder or file, from the repository's root"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument("--count", type=int, default=20, help="how many mutants (default: 20)")
    parser.add_argument(
        "--tests", nargs="+", metavar="PATH", help="tests to run instead of the rooms' mirror"
    )
    parser.add_argument("--timeout", type=float, default=60, help="seconds added to a mutant's expected time")
    options = parser.parse_args(argv)
    rooms = [Path(room).as_posix() for room in options.rooms]
    if missing := [room for room in rooms if not (root / room).exists()]:
        parser.error(f"not in the repository: {', '.join(missing)}")
    drawn, lives = draw(rooms, options.seed, options.count, root), 0
    with tempfile.TemporaryDirectory() as name:
        folder, out = Path(name, "copy"), Path(name, "lines.json")
        copy_of_the_repository(root, folder)
        record = {"MUTANTS_OUT": str(out), "MUTANTS_ROOMS": os.pathsep.join(rooms)}
        if failure := run(folder, ["-p", "mutants", *(options.tests or mirror_of(rooms, root))], **record):
            sys.exit(f"the tests fail without a mutant\n{failure}")
        units = json.loads(out.read_text())
        print(f"{len(drawn)} mutants; {sum(len(unit['tests']) for unit in units.values())} tests", flush=True)
        for mutant in drawn:
            start = time.monotonic()
            result = outcome(mutant, units, folder, options.timeout)
            lives += result != "killed"
            print(f"{time.monotonic() - start:5.0f} s  {result:6}  {mutant}", flush=True)
    print(f"{lives} of {len(drawn)} live (seed {options.seed})")
    return int(10 * lives > len(drawn))


if __name__ == "__main__":
    sys.exit(main())
