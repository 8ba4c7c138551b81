"""Timing: candidates in turn, round by round; the fastest counts."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.progress import Progress


class NoNumber(Exception):
    """Why a candidate gets no number at this length: a word or two for the table, a colon, and the reason."""


@dataclasses.dataclass
class Program:
    """Something to run and time.

    Attributes:
      run: runs it and waits for the result.
      temp_bytes: temporary memory of the compiled program, where it is known.
      steps: what one run does, in steps: a time counts for one of them.
    """

    run: Callable[[], Any]
    temp_bytes: int | None
    steps: int = 1
    calls: int = 1
    short: bool = False
    seconds: list[float] = dataclasses.field(default_factory=list)

    def warm_up(self) -> None:
        """Decides how often a round calls it: a short program often enough for the clock. For a long one this is a
        round: it is compiled already, and what a first run costs besides is nothing beside a second."""
        spent = self._timed(1)
        if spent > 1.0:
            self.seconds.append(spent / self.steps)
            return
        spent = self._timed(1)
        self.calls = max(1, min(50, int(0.005 / spent)))
        self.short = spent < 0.1

    def measure(self) -> float:
        """Notes the time of one step in one round; returns that of the round.

        A short program runs once before that: a large one before it gives memory back to the system in the background,
        and decoding was measured at a hundred times its time meanwhile.
        """
        if self.short:
            self.run()
        spent = self._timed(self.calls)
        self.seconds.append(spent / self.calls / self.steps)
        return spent

    def _timed(self, calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            self.run()
        return time.perf_counter() - start


@dataclasses.dataclass
class Candidate:
    """A case at one length, compiled and checked: its programs by name (the keys of `eval.speed.report.PROGRAMS`).

    facts: further columns of its row.
    """

    programs: dict[str, Program]
    facts: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Case:
    """What one row of the table measures.

    Attributes:
      name: of the row.
      growth: the power of the length that its time grows with, at most.
      make: compiles and checks the candidate; raises NoNumber with the reason where there is nothing to time.
    """

    name: str
    growth: int
    make: Callable[[], Candidate]


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
    """A program that runs a function on these arguments; NoNumber where its temporary memory would not fit."""
    compiled = jax.jit(function).lower(*arguments).compile()
    analysis: Any = compiled.memory_analysis()
    check_room(analysis.temp_size_in_bytes)
    return Program(lambda: jax.block_until_ready(compiled(*arguments)), analysis.temp_size_in_bytes, steps)


def check_room(temp: int) -> None:
    """NoNumber where this many bytes of temporary memory would not fit.

    The compiler's figure leaves out what the runtime takes besides: a CPU program of three quarters of the room was
    killed by the operating system.
    """
    room = available_bytes()
    if temp > 0.6 * room:
        raise NoNumber(
            f"no room: needs {temp / 2**30:.1f} GiB of temporary memory, {room / 2**30:.1f} GiB are there"
        )


def check_patience(case: Case, length: int, earlier: Sequence[dict], limit: float) -> None:
    """NoNumber where a round would take longer than `limit` seconds, by the longest of the `earlier` rows."""
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
    progress: Progress,
    *,
    label: str,
    repeats: int,
    patience: float,
    limit: float,
) -> None:
    """Checks and times all cases at one length; appends their rows, also when interrupted.

    rows: what the same cases took at other lengths. repeats, patience, limit: see `SpeedOptions`.
    """
    candidates: dict[str, Candidate] = {}
    notes: dict[str, str] = {}
    task = progress.add_task("", total=len(cases))
    try:
        for case in cases:
            progress.update(task, description=f"{label}, n = {length}: checking {case.name}")
            try:
                check_patience(case, length, rows, limit)
                candidate = case.make()
                for program in candidate.programs.values():
                    program.warm_up()
                candidates[case.name] = candidate
            except NoNumber as reason:
                notes[case.name] = str(reason)
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                notes[case.name] = "no room: ran out of memory"
            progress.advance(task)
        progress.reset(task, total=repeats * len(candidates))
        spent = {name: sum(sum(p.seconds) for p in c.programs.values()) for name, c in candidates.items()}
        for i in range(repeats):
            if not progress.console.is_terminal:  # where nobody sees a bar
                progress.console.print(
                    f"{label}, n = {length}: {len(candidates)} of {len(cases)} ready, round {i + 1} of {repeats}"
                )
            for name, candidate in candidates.items():
                progress.update(task, description=f"{label}, n = {length}: timing {name}")
                done = min(len(program.seconds) for program in candidate.programs.values())
                if done < repeats and (spent[name] < patience or done < 2):
                    spent[name] += sum(program.measure() for program in candidate.programs.values())
                progress.advance(task)
    finally:
        rows.extend(as_row(length, name, candidate) for name, candidate in candidates.items())
        rows.extend({"length": length, "name": name, "note": note} for name, note in notes.items())
        progress.remove_task(task)


def as_row(length: int, name: str, candidate: Candidate) -> dict:
    """A JSON-ready row; a program that an interruption kept from being timed has None for seconds."""
    row: dict[str, Any] = {"length": length, "name": name, "note": ""}
    for which, program in candidate.programs.items():
        row[f"{which}_s"] = min(program.seconds, default=None)
        row[f"{which}_temp_bytes"] = program.temp_bytes
    if any(not program.seconds for program in candidate.programs.values()):
        row["note"] = "interrupted: not timed to the end of a round"
    return {**row, "rounds": min(len(p.seconds) for p in candidate.programs.values()), **candidate.facts}


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
