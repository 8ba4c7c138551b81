"""Checks and times candidates; the fastest round counts.

All candidates of a length run in turn, round by round, so that other load on the machine falls on all alike. On a GPU
many calls are enqueued before one wait, because a clock around a single call measures the launch.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress


class NoNumber(Exception):
    """Why a candidate gets no number at this length: a word or two for the table, a colon, and the reason."""


def on_gpu() -> bool:
    """Whether JAX computes on a GPU."""
    return jax.default_backend() == "gpu"


@dataclasses.dataclass
class Program:
    """Something to run and time.

    Attributes:
      start: begins a run and returns its result, which may not be there yet.
      temp_bytes: temporary memory of the compiled program, if known.
      steps: what one run does, in steps; times are for one step.
      wait: waits for a result and returns it.
    """

    start: Callable[[], Any]
    temp_bytes: int | None
    steps: int = 1
    wait: Callable[[Any], Any] = jax.block_until_ready
    calls: int = 1
    short: bool = False
    seconds: list[float] = dataclasses.field(default_factory=list)

    def run(self) -> Any:
        """Runs it and waits for the result."""
        return self.wait(self.start())

    def warm_up(self) -> None:
        """Decides how often a round calls it: a short program often enough for the clock. A long first run counts as a
        round, because it is compiled already and other costs of a first run are small."""
        spent = self._timed(1)
        if spent > 1.0:
            self.seconds.append(spent / self.steps)
            return
        spent = self._timed(1)
        most, wanted = (200, 0.02) if on_gpu() else (50, 0.005)
        self.calls = max(1, min(most, int(wanted / spent)))
        self.short = spent < 0.1

    def measure(self) -> float:
        """Notes the time of one step in one round; returns the time of the round.

        A short program runs once before that. After a large program, memory goes back to the system in the background,
        and decoding meanwhile took a hundred times as long.
        """
        if self.short:
            self.run()
        spent = self._timed(self.calls)
        self.seconds.append(spent / self.calls / self.steps)
        return spent

    def _timed(self, calls: int) -> float:
        began = time.perf_counter()
        if on_gpu():  # runs calls in order; a CPU may run independent calls at the same time
            for _ in range(calls):
                result = self.start()
            self.wait(result)
        else:
            for _ in range(calls):
                self.run()
        return time.perf_counter() - began


@dataclasses.dataclass
class Candidate:
    """A case at one length, compiled and checked: its programs by name (the keys of `eval.speed.report.PROGRAMS`).

    Attributes:
      facts: more columns of its row.
      spent: seconds of all rounds so far.
    """

    programs: dict[str, Program]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)
    spent: float = 0.0

    @property
    def rounds(self) -> int:
        """How often all its programs were timed."""
        return min(len(program.seconds) for program in self.programs.values())

    def warm_up(self) -> None:
        """See `Program.warm_up`."""
        for program in self.programs.values():
            program.warm_up()
            self.spent += sum(program.seconds)

    def measure(self) -> None:
        """Times a round of all its programs."""
        self.spent += sum(program.measure() for program in self.programs.values())


@dataclasses.dataclass(frozen=True)
class Case:
    """What one row of the table measures.

    Attributes:
      name: of the row.
      growth: the power of the length that its time grows with, at most.
      make: compiles and checks the candidate; raises NoNumber with the reason if there is nothing to time.
    """

    name: str
    growth: int
    make: Callable[[], Candidate]


@contextlib.contextmanager
def sigterm_interrupts() -> Iterator[None]:
    """Turns a scheduler's SIGTERM into Ctrl-C, so that it does not lose an hour's measurements."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def available_bytes() -> int:
    """Memory that a program may still take: the device's own, or this machine's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def compile_program(function: Callable, *arguments: Any, steps: int = 1) -> Program:
    """A program that runs a function on these arguments; NoNumber if its temporary memory would not fit."""
    compiled: Any = jax.jit(function).lower(*arguments).compile()
    temp = compiled.memory_analysis().temp_size_in_bytes
    check_memory(temp)
    return Program(lambda: compiled(*arguments), temp, steps)


def check_memory(temp: int, share: float = 0.6, what: str = "of temporary memory") -> None:
    """NoNumber if this many bytes take more than a share of the available memory.

    The compiler's figure leaves out the runtime's own memory: the operating system has killed a CPU program that took
    three quarters of what was free.
    """
    free = available_bytes()
    if temp > share * free:
        raise NoNumber(f"no room: needs {temp / 2**30:.1f} GiB {what}, {free / 2**30:.1f} GiB are available")


def check_patience(case: Case, length: int, earlier: Sequence[dict], limit: float) -> None:
    """NoNumber if a round would take longer than `limit` seconds, judging by the longest of the `earlier` rows."""
    own = [row for row in earlier if row["name"] == case.name and row["length"] < length and not row["note"]]
    if not own:
        return
    last = max(own, key=lambda row: row["length"])
    took = sum(last[name] for name in last if name.endswith("_s"))
    expected = took * (length / last["length"]) ** case.growth
    if expected > limit:
        raise NoNumber(
            f"too slow: a round would take about {expected:.0f} s, by what it took at n = {last['length']}; "
            f"limit is {limit:g} s"
        )


def measure(
    cases: Sequence[Case],
    length: int,
    rows: list[dict],
    *,
    label: str,
    repeats: int,
    patience: float,
    limit: float,
) -> None:
    """Checks and times all cases at one length; appends their rows, also when interrupted, and prints each.

    rows: what the same cases took at other lengths. repeats, patience, limit: see `SpeedOptions`.
    """
    candidates: dict[str, Candidate] = {}
    notes: dict[str, str] = {}
    progress = Progress(console=Console(stderr=True), transient=True)
    task = progress.add_task("", total=len(cases))
    progress.start()
    try:
        for case in cases:
            progress.update(task, description=f"{label}, n = {length}: checking {case.name}")
            try:
                check_patience(case, length, rows, limit)
                candidate = case.make()
                candidate.warm_up()
                candidates[case.name] = candidate
            except NoNumber as reason:
                notes[case.name] = str(reason)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                notes[case.name] = "no room: ran out of memory"
            progress.advance(task)
        progress.reset(task, total=repeats * len(candidates))
        for i in range(repeats):
            if not progress.console.is_terminal:  # where nobody sees a bar
                progress.console.print(
                    f"{label}, n = {length}: {len(candidates)} of {len(cases)} ready, round {i + 1} of {repeats}"
                )
            for name, candidate in candidates.items():
                progress.update(task, description=f"{label}, n = {length}: timing {name}")
                if candidate.rounds < repeats and (candidate.spent < patience or candidate.rounds < 2):
                    candidate.measure()
                progress.advance(task)
    finally:
        found = [as_row(length, name, candidate) for name, candidate in candidates.items()]
        for row in (
            *found,
            *({"length": length, "name": name, "note": note} for name, note in notes.items()),
        ):
            rows.append(row)
            progress.console.print(f"{label}, {row_line(row)}", highlight=False, soft_wrap=True)
        progress.stop()


def as_row(length: int, name: str, candidate: Candidate) -> dict:
    """A JSON-ready row; a program that an interruption kept from being timed has None for seconds."""
    row: dict[str, Any] = {"length": length, "name": name, "note": ""}
    for which, program in candidate.programs.items():
        row[f"{which}_s"] = min(program.seconds, default=None)
        row[f"{which}_temp_bytes"] = program.temp_bytes
    if not candidate.rounds:
        row["note"] = "interrupted: not timed to the end of a round"
    return {**row, "rounds": candidate.rounds, **candidate.facts}


def row_line(row: dict) -> str:
    """A row as a line of progress."""
    times = [f"{name[:-2]} {1e3 * row[name]:.4g} ms" for name in row if name.endswith("_s") and row[name]]
    return f"n = {row['length']}, {row['name']}: {row['note'] or ', '.join(times)}"


def check_finite(what: str, got: Any, shape: tuple[int, ...]) -> None:
    """NoNumber unless a result has the right shape and finite entries."""
    if got.shape != shape:
        raise NoNumber(f"WRONG RESULT: {what} has shape {got.shape}, expected {shape}")
    if not bool(jnp.all(jnp.isfinite(got))):
        raise NoNumber(f"WRONG RESULT: {what} is not finite")


def check_equal(what: str, got: Any, right: Any, dtype: str) -> None:
    """NoNumber unless two computations of the same outputs agree."""
    tolerance = {"float32": 1e-3, "bfloat16": 5e-2}[dtype]
    got, right = (np.asarray(x.astype(jnp.float32)) for x in (got, right))
    error = float(np.linalg.norm(got - right) / np.linalg.norm(right))
    if not error <= tolerance:
        raise NoNumber(
            f"WRONG RESULT: {what} is off the forward pass by {error:.1e} of its norm, "
            f"at most {tolerance:.0e} allowed"
        )
