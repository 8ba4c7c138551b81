"""Checks every kernel on this machine's GPU against float64, and times it: python -m eval.gpu_check.

Run this first on a new GPU; four minutes are enough. It prints each line when it is ready, the most important first;
`--json` keeps them, and what each kernel of a timed call took.
Processes, one for each core but two, compile at the same time; while one of them times a program, the others are
stopped. It needs `pip install -e '.[gpu,train]'`, no data and no test package. `--interpret` runs the same checks
in Triton's interpreter, without a GPU, at small sizes.

The exit status is 1 if a result or a gradient is wrong or a program fails, and 2 if the kernels cannot run here.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib.util
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from brl_jax.fields import Checked, Count, Positive
from eval.chips.ptxas import wheel_assemblers
from eval.harness.options import check_names, command
from eval.harness.output import json_path
from train.engine.errors import RunError, UserError

ROOT = Path(__file__).parents[2]
#: Operations that our kernels compute, and the kernels' folders; XLA computes `OTHERS`.
KERNELS = {
    "local": "local", "local_packed": "local", "local_sinks": "local", "local_capped": "local",
    "compress": "compress", "compress_relu2": "compress", "compress_laplace": "compress",
    "compress_blocks": "compress", "propagate": "propagate", "propagate_relu2": "propagate",
    "propagate_laplace": "propagate", "selected": "selected", "native_sparse": "selected", "gau": "squared_relu",
}  # fmt: skip
RECURRENT = (
    "linear", "delta", "gated_delta", "scalar_decay", "gla", "kda", "norm", "retention", "linear_packed",
)  # fmt: skip
OTHERS = ("full", "diag", "bsbr", "flash")
NAMES = (*KERNELS, *RECURRENT, *OTHERS, "training", "copy", "matmul", "flex", "fla")
_GRADIENTS = ("query_gradient", "key_gradient")
_DELTA = ("chunks", "maps", "states"), ("gradient_maps", "state_gradient", "pair_gradient", "gradient")
#: The families of kernels as `adjustable` names them: (operation, kernels of its forward pass, kernels of its backward
#: pass), by the fields of the family's sizes.
TUNED = {
    "local": ("local", ("forward",), _GRADIENTS),
    "compress": ("compress", ("forward",), ("backward",)),
    "propagate": ("propagate", ("forward",), _GRADIENTS),
    "squared_relu": ("gau", ("forward",), (*_GRADIENTS, "value_gradient")),
    "selected": ("selected", ("by_query",), ("by_key",)),
    "delta_by_feature": ("kda", *_DELTA),
    "sum_by_feature": ("gla", ("sums", "outputs"), ("value_gradient", "gradients")),
    "sum": ("scalar_decay", ("sums", "outputs"), _GRADIENTS),
    "delta": ("gated_delta", *_DELTA),
}
#: Options of XLA that a training step is compiled with, besides none: they shorten its tuning of matrix products.
XLA_OPTIONS = ({"xla_gpu_enable_triton_gemm": False}, {"xla_gpu_autotune_level": 0})
_GROUPED = {"heads": 16, "kv_heads": 4}
_GAU = {"heads": 1}
#: What is timed, in this order: (operation, size, implementations).
TIMED: tuple[tuple[str, dict, tuple[str, ...]], ...] = (
    ("local", {}, ("default", "triton")),
    ("linear", {}, ("default",)),
    ("delta", {}, ("default",)),
    ("gated_delta", {}, ("default",)),
    ("scalar_decay", {}, ("default",)),
    ("gla", {}, ("default",)),
    ("kda", {}, ("default",)),
    ("compress", {"n": 131072}, ("default",)),
    ("propagate", {"n": 131072}, ("default",)),
    ("full", {}, ("default",)),
    ("local_packed", {}, ("default",)),
    ("compress", {}, ("default",)),
    ("propagate", {}, ("default",)),
    ("gau", _GAU, ("default",)),
    ("selected", _GROUPED, ("default",)),
    ("local", {"heads": 16, "head_dim": 64}, ("default", "triton")),
    ("local", {"n": 65536}, ("default", "triton")),
    ("local", {"head_dim": 256, "heads": 4}, ("default", "cudnn")),
    ("compress", {"n": 131072, "few": 64, "heads": 16, "head_dim": 64}, ("default",)),
    ("propagate", {"n": 131072, "few": 64, "heads": 16, "head_dim": 64}, ("default",)),
    ("norm", {}, ("default",)),
    ("retention", {}, ("default",)),
    ("linear_packed", {}, ("default",)),
    ("linear", {"heads": 16, "head_dim": 64}, ("default",)),
    ("delta", {"heads": 16, "head_dim": 64}, ("default",)),
    *((name, {}, ("default",)) for name in ("diag", "bsbr", "flash")),
    ("compress_blocks", {"few": 64}, ("default",)),
    ("native_sparse", _GROUPED, ("default",)),
    *(
        (name, {}, ("xla",))
        for name in ("local", "linear", "delta", "gated_delta", "scalar_decay", "gla", "kda")
    ),
    ("compress", {"n": 131072}, ("xla",)),
    ("propagate", {"n": 131072}, ("xla",)),
)
PEERS = ("flex local", "fla linear", "fla delta", "fla gated_delta", "fla scalar_decay", "fla gla", "fla kda")
_CHECKED = {"n": 200, "heads": 4, "kv_heads": 2, "head_dim": 64, "few": 20, "window": 70, "batch": 2}
_SMALL = _CHECKED | {"n": 72, "heads": 2, "kv_heads": 1, "head_dim": 16, "few": 10, "window": 20}


@dataclasses.dataclass(frozen=True)
class GpuCheckOptions(Checked):
    """What to check."""

    minutes: Positive | None = None
    """A hard end; 4 minutes if not given, and 5 with interpret."""
    json: str | None = None
    """A file for everything that is found; it grows line by line."""
    tune: bool = False
    """Also time a dozen tilings of each kernel."""
    interpret: bool = False
    """Check in Triton's interpreter, without a GPU."""
    only: tuple[str, ...] = ()
    """Operations, and peers by their library; all if not given."""
    workers: Count | None = None
    """Processes that compile; one for each core but two if not given."""

    def __post_init__(self) -> None:
        check_names(self, only=NAMES)
        if self.tune and self.interpret:
            raise ValueError("tune must be False with interpret, which has no GPU, got True")


def _task(
    kind: str, operation: str, size: dict | None = None, implementation: str = "default", **more: Any
) -> dict:
    return {
        "kind": kind,
        "operation": operation,
        "size": size or {},
        "implementation": implementation,
        **more,
    }


def checks(dtype: str) -> Iterator[dict]:
    """The checks of one dtype: each default, each kernel, and the sizes that have separate tilings."""
    for name in (*RECURRENT, *KERNELS, *OTHERS):
        size = _CHECKED | ({"kv_heads": None} if name in ("compress_blocks", *OTHERS) else {})
        yield _task("check", name, size, dtype=dtype)
        if name in RECURRENT or name == "local":
            yield _task("check", name, size, "triton", dtype=dtype)
    for head_dim in (40, 128, 256):
        yield _task("check", "local", _CHECKED | {"head_dim": head_dim}, "triton", dtype=dtype)
    for name in ("linear", "delta", "gla", "kda", "compress", "propagate", "gau", "selected"):
        yield _task("check", name, _CHECKED | {"head_dim": 128, "few": 128, "batch": 1}, dtype=dtype)


def interpreted() -> Iterator[dict]:
    """The checks without a GPU, of small sizes: the kernels in float32 and float16, the rest through XLA in float32."""
    changes: dict[str, dict] = {"compress_blocks": {"kv_heads": None}, "selected": {"batch": 1}}
    for dtype in ("float32", "float16"):
        for name in (*RECURRENT, *KERNELS):
            if name != "native_sparse":  # whose kernel is `selected`
                yield _task("check", name, _SMALL | changes.get(name, {}), "triton", dtype=dtype)
    for name in (*RECURRENT, *OTHERS, "native_sparse"):
        yield _task("check", name, _SMALL | ({"kv_heads": None} if name in OTHERS else {}), dtype="float32")


def tasks(options: GpuCheckOptions) -> list[dict]:
    """Everything to do, the most important first."""
    found: list[dict] = []
    if options.interpret:
        found += interpreted()
    else:
        timed = [
            _task("speed", name, size, implementation, passes=passes, dtype="bfloat16")
            for name, size, implementations in TIMED
            for implementation in implementations
            for passes in ("forward", "both")
        ]
        tuned = [
            _task(
                "tune", operation, _TUNED_SIZES.get(family), "triton", family=family, kernel=name, passes=passes,
                dtype="bfloat16",
            )
            for family, (operation, forward, backward) in TUNED.items()
            for passes, names in (("forward", forward), ("both", backward))
            for name in names
        ]  # fmt: skip
        first = [task for task in timed if not task["size"] and task["implementation"] == "default"][:14]
        found += [_task("ceiling", name) for name in ("copy", "matmul")]
        found += [
            _task("peer", name, {"n": 16384, "heads": 8, "head_dim": 128, "window": 256}) for name in PEERS
        ]
        found += [_task("training", "training", options={}), *first, *checks("bfloat16")]
        found += [task for task in timed if task not in first and task["implementation"] != "xla"]
        found += [*(tuned if options.tune else ()), *checks("float32")]
        found += [_task("training", "training", options=options) for options in XLA_OPTIONS]
        found += [task for task in timed if task["implementation"] == "xla"]
        found += checks("float16")
    if options.only:
        found = [
            t for t in found if t["operation"] in options.only or t["operation"].split()[0] in options.only
        ]
    return [{**task, "order": n} for n, task in enumerate(found)]


_TUNED_SIZES: dict[str, dict] = {"squared_relu": _GAU, "selected": _GROUPED, "propagate": {"n": 131072}}
_TUNED_SIZES["compress"] = _TUNED_SIZES["propagate"]


class Process:
    """A worker: its pipes, and the task that it has."""

    def __init__(self, options: GpuCheckOptions, peer: bool):
        environment = os.environ | {
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
            "TF_CPP_MIN_LOG_LEVEL": "2",
            "TRITON_DEFAULT_FP_FUSION": "1",  # Triton 3.9 warns without it
            "JAX_PLATFORMS": "cpu" if options.interpret else "cuda",
        }
        environment.pop("TRITON_INTERPRET", None)
        if options.interpret:
            environment |= {"TRITON_INTERPRET": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
        line = [sys.executable, "-m", f"eval.chips.gpu_{'peers' if peer else 'worker'}"]
        if peer:
            environment.pop("PYTHONPATH", None)
        elif (folder := wheel_assemblers()) is not None:  # an older one on PATH refuses a newer Triton's code
            environment["PATH"] = f"{folder}{os.pathsep}{environment.get('PATH', '')}"
        self.task: dict | None = None
        self.peer, self.ready, self.busy = peer, False, True
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115  # read when the process has failed
        self.rest, self.held = b"", 0.0
        self.process = subprocess.Popen(
            line, cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.errors
        )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.stdin, self.stdout = self.process.stdin, self.process.stdout
        os.set_blocking(self.stdout.fileno(), False)

    def write(self, text: str) -> None:
        try:
            self.stdin.write(f"{text}\n".encode())
            self.stdin.flush()
        except BrokenPipeError:
            pass  # its end is read from the other pipe

    def read(self) -> list[dict] | None:
        """The messages that have come; None at the end."""
        data = self.stdout.read()
        if data == b"":
            return None
        *lines, self.rest = (self.rest + (data or b"")).split(b"\n")
        return [json.loads(line) for line in lines]

    def last_words(self) -> str:
        self.errors.seek(max(0, self.errors.seek(0, os.SEEK_END) - 2000))
        lines = self.errors.read().decode(errors="replace").split("\n")
        return next((line.strip() for line in reversed(lines) if line.strip()), "")[-200:]


class Report:
    """What was found: a line of text for each row, and the JSON file."""

    def __init__(self, path: Path | None):
        self.path, self.start = path, time.monotonic()
        self.found: dict[str, Any] = {"rows": []}

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.start:5.0f} s  {text}", flush=True)

    def save(self) -> None:
        if self.path is not None:
            whole = self.path.with_name(f"{self.path.name}.new")
            whole.write_text(json.dumps(self.found, indent=1))
            whole.replace(self.path)

    def add(self, row: dict) -> None:
        row["at_s"] = round(time.monotonic() - self.start, 1)
        self.found["rows"].append(row)
        self.say(line_of(row))
        self.save()

    @property
    def wrong(self) -> list[dict]:
        return [row for row in self.found["rows"] if row.get("wrong") and row["kind"] != "tune"]


def line_of(row: dict) -> str:
    """One row as a line of text."""
    size = ",".join(f"{name}={value}" for name, value in row["size"].items())
    what = f"{row['kind']:8} {row['operation']:17} {row['implementation']:7} {row.get('dtype', ''):8} "
    what += f"{row.get('kernel', row.get('passes', '')):14} "
    if row.get("note"):
        return f"{what} {row['note']} {size}"
    parts = []
    if "errors" in row:
        verdict = "WRONG" if row["wrong"] else "ok"
        worst = max(row["errors"], key=row["errors"].get)
        parts.append(f"{verdict} {row['worst']:.1e} of {row['most']:.0e} ({worst})")
    if "first_step_s" in row:
        parts.append(
            f"first step after {row['first_step_s']:.1f} s, XLA's options {row['options'] or 'its own'}"
        )
    for name, unit in (
        ("ms", "ms"),
        ("ms_both", "ms with backward"),
        ("tb_s", "TB/s"),
        ("tflop_s", "TFLOP/s"),
    ):
        if name in row:
            parts.append(f"{row[name]:.4g} {unit}")
    if "tile" in row:
        parts.append(f"tile {tuple(row['tile'])}" + (" WRONG" if row.get("wrong") else ""))
    if "by" in row:
        parts.append(f"by {row['by']}")
    if "compile_s" in row:
        parts.append(f"lower {row['lower_s']} compile {row['compile_s']} s")
    return f"{what} {'; '.join(parts)}; {size}"


class Crew:
    """The processes and the tasks: who does what, and whose turn at the GPU it is."""

    def __init__(self, options: GpuCheckOptions, todo: Sequence[dict], report: Report):
        self.options, self.report = options, report
        self.queues = {
            peer: collections.deque(t for t in todo if (t["kind"] == "peer") == peer)
            for peer in (False, True)
        }
        self.selector = selectors.DefaultSelector()
        self.timing: Process | None = None
        self.starts = 0

    def start(self, peer: bool) -> None:
        self.starts += 1
        process = Process(self.options, peer)
        self.selector.register(process.stdout, selectors.EVENT_READ, process)

    @property
    def processes(self) -> list[Process]:
        return [key.data for key in self.selector.get_map().values()]

    def hand_out(self, process: Process) -> None:
        """The next task, or the end."""
        queue = self.queues[process.peer]
        process.task, process.busy = (queue.popleft(), True) if queue else (None, False)
        if process.task is not None:
            process.write(json.dumps(process.task))

    def signal_others(self, number: int) -> None:
        for other in self.processes:
            if other is not self.timing:
                other.process.send_signal(number)

    def give_turn(self) -> None:
        waiting = {p.task["order"]: p for p in self.processes if p.ready and p.task is not None}
        if self.timing is None and waiting:
            self.timing = waiting[min(waiting)]
            self.timing.ready, self.timing.held = False, time.monotonic()
            self.signal_others(signal.SIGSTOP)
            self.timing.write("go")

    def end_turn(self) -> None:
        self.signal_others(signal.SIGCONT)
        self.timing = None

    def heed(self, process: Process, message: dict) -> None:
        event = message["event"]
        if event == "refused":
            raise UserError(message["why"])
        if event == "hello":
            if not process.peer and "device" not in self.report.found:
                self.report.found |= {name: message[name] for name in ("device", "capability", "versions")}
                versions = ", ".join(f"{name} {version}" for name, version in message["versions"].items())
                self.report.say(
                    f"{message['device']}, compute capability {message['capability']}; {versions}"
                )
            self.hand_out(process)
        elif event == "ready":
            process.ready = True
        elif event == "timed":
            self.end_turn()
        elif event == "row":
            self.report.add(message["row"])
        elif event == "done":
            self.hand_out(process)

    def bury(self, process: Process) -> None:
        """A process has ended: its task failed, and another process takes its place."""
        self.selector.unregister(process.stdout)
        process.process.kill()
        process.process.wait()
        if self.timing is process:
            self.end_turn()
        if process.task is None and process.busy:  # before its first task
            raise RunError(f"a process did not start: {process.last_words()}")
        if process.task is not None:
            note = f"FAILED: the process ended, status {process.process.returncode}: {process.last_words()}"
            self.report.add(
                {**process.task, "note": note, "wrong": process.task["kind"] not in ("tune", "peer")}
            )
            if self.starts < 100 and self.queues[process.peer]:
                self.start(process.peer)

    def run(self, deadline: float) -> bool:
        """Works until everything is done, or the time is over; whether everything is."""
        workers = self.options.workers or max(1, (os.cpu_count() or 1) - (0 if self.options.interpret else 2))
        for _ in range(min(workers, len(self.queues[False]))):
            self.start(False)
        if self.queues[True] and importlib.util.find_spec("torch") is not None:
            self.start(True)
        elif self.queues.pop(True):
            self.report.say("peers: PyTorch is not installed")
        try:
            while any(process.busy for process in self.processes):
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                for key, _ in self.selector.select(min(left, 1.0)):
                    messages = key.data.read()
                    if messages is None:
                        self.bury(key.data)
                    for message in messages or ():
                        self.heed(key.data, message)
                if self.timing is not None and time.monotonic() - self.timing.held > 20:
                    self.timing.process.kill()  # a kernel that does not end
                self.give_turn()
            return True
        finally:
            for process in self.processes:
                process.process.kill()


def summary(report: Report, todo: Sequence[dict], done: bool) -> None:
    """What is wrong, what was not reached, and the tilings for the source."""
    rows = report.found["rows"]
    best: dict[tuple, dict] = {}
    for row in rows:
        if row["kind"] == "tune" and "ms" in row and not row.get("wrong"):
            key = row["family"], row["kernel"]
            first = best.setdefault(key, {"default": row, "best": row})
            first["best"] = min(first["best"], row, key=lambda r: r["ms"])
    for (family, kernel), found in best.items():
        old, new = found["default"], found["best"]
        fields = ", ".join(old["fields"])
        report.say(
            f"tiles    {family}.{kernel} ({fields}): {tuple(old['tile'])} {old['ms']:.4g} ms, "
            f"best {tuple(new['tile'])} {new['ms']:.4g} ms"
        )
    for row in report.wrong:
        report.say(f"WRONG    {line_of(row)}")
    reached = {row["order"] for row in rows}
    missing = [task for task in todo if task["order"] not in reached]
    counts = collections.Counter(row["kind"] for row in rows)
    report.found |= {"finished": done, "not_reached": missing}
    report.save()
    figures = ", ".join(f"{n} {kind}" for kind, n in counts.items())
    report.say(f"{figures}; {len(report.wrong)} wrong; {len(missing)} of {len(todo)} tasks not reached")


@command(GpuCheckOptions(), "eval.gpu_check", "Checks every kernel against float64, and times it.")
def main(options: GpuCheckOptions) -> None:
    report = Report(json_path(options.json))
    minutes = options.minutes or (5.0 if options.interpret else 4.0)
    needed = ("triton",) if options.interpret else ("triton", "jax_triton")
    for name in needed:
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{name} is missing: pip install -e '.[gpu,train]'")
    todo = tasks(options)
    done = Crew(options, todo, report).run(report.start + 60 * minutes)
    summary(report, todo, done)
    if report.wrong:
        raise RunError(f"{len(report.wrong)} of {len(report.found['rows'])} rows are wrong")
    if options.interpret and not done:
        raise RunError(f"not finished after {minutes:g} minutes")
