"""A process of `eval.gpu_check`: takes tasks as lines of JSON, and writes what it finds as lines of JSON.

It compiles on its own and asks before it times anything. The parent then stops all other processes, so that neither the
GPU nor Python's lock is shared while a clock runs. A kernel that destroys its CUDA context ends one process.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dataclasses
import functools
import json
import math
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from brl_jax.attention.core.dispatch import Implementation

ROUNDS = 3
# How long a round of calls lasts at least, and the bytes of inputs over which calls rotate: more than any L2 cache.
_SECONDS, _ROTATED = 0.02, 2**28
# Directions in which each gradient is compared with the oracle's differences, and the step of those.
_DIRECTIONS, _STEP = 4, 1e-4
# XLA then takes cuBLAS for products outside kernels, and has fewer forms to time.
_QUICK: dict[str, str | bool] = {"xla_gpu_enable_triton_gemm": False}
#: The most that a result may be off, of its norm.
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5}


@dataclasses.dataclass
class Worker:
    """What tasks need: where rows go, and the turn at the GPU."""

    send: Callable[[dict], None]
    interpret: bool

    def turn(self, timed: Callable[[], Any]) -> Any:
        """The result of a function that has the GPU to itself."""
        self.send({"event": "ready"})
        if sys.stdin.readline().strip() != "go":
            sys.exit(0)
        try:
            return timed()
        finally:
            self.send({"event": "timed"})


def relative_error(got: Any, right: Any) -> float:
    """The norm of the difference over the norm; infinite for what is not finite."""
    import numpy as np

    got, right = (np.asarray(x, np.float64) for x in (got, right))
    error = float(np.linalg.norm(got - right) / max(float(np.linalg.norm(right)), 1e-30))
    return error if math.isfinite(error) else math.inf


def gradient_error(oracle: Callable, arguments: tuple, position: int, cotangent: Any, gradient: Any) -> float:
    """How far a gradient is off, of its norm, by central differences of the float64 oracle.

    In a random direction d, (error . d)^2 is |error|^2 on average; a few directions give the norm.
    """
    import numpy as np

    rng, squares = np.random.default_rng(0), []
    gradient = np.asarray(gradient, np.float64)
    for _ in range(_DIRECTIONS):
        direction = rng.standard_normal(gradient.shape)
        ends = []
        for step in (_STEP, -_STEP):
            moved = list(arguments)
            moved[position] = moved[position] + step * direction
            ends.append(float((oracle(*moved) * cotangent).sum()))
        squares.append(((gradient * direction).sum() - (ends[0] - ends[1]) / (2 * _STEP)) ** 2)
    error = math.sqrt(sum(squares) / _DIRECTIONS) / max(float(np.linalg.norm(gradient)), 1e-30)
    return error if math.isfinite(error) else math.inf


def compile_program(function: Callable, arguments: Any, options: dict | None = None) -> tuple[Any, dict]:
    """A compiled program and facts about it; without options for XLA, it tunes all forms where there are no kernels."""
    import jax

    start = time.perf_counter()
    lowered = jax.jit(function).lower(*arguments)
    text = lowered.as_text()
    signs = {"cuDNN": "cudnn$fmha", "Triton": "triton_kernel", "interpreter": "python_cpu_callback"}
    kernels = [name for name, sign in signs.items() if sign in text]
    middle = time.perf_counter()
    if options is None:
        options = _QUICK if kernels else {}
    compiled = lowered.compile(options if jax.default_backend() == "gpu" else None)
    end = time.perf_counter()
    memory = compiled.memory_analysis()
    assert memory is not None
    facts = {
        "by": "+".join(kernels) or "XLA",
        "lower_s": round(middle - start, 2),
        "compile_s": round(end - middle, 2),
        "temporary_mib": round(memory.temp_size_in_bytes / 2**20, 1),
    }
    return compiled, facts


def seconds_a_call(run: Callable[..., Any], sets: list[tuple]) -> float:
    """The median over rounds of back-to-back calls: many are enqueued, and the last is waited for."""
    import jax

    for arguments in sets[:2]:
        jax.block_until_ready(run(*arguments))
    start = time.perf_counter()
    for _ in range(3):
        out = run(*sets[0])
    jax.block_until_ready(out)
    calls = max(2, min(500, math.ceil(3 * _SECONDS / max(time.perf_counter() - start, 1e-9))))
    times = []
    for _ in range(ROUNDS):
        start = time.perf_counter()
        for n in range(calls):
            out = run(*sets[n % len(sets)])
        jax.block_until_ready(out)
        times.append((time.perf_counter() - start) / calls)
    return statistics.median(times)


def kernel_microseconds(run: Callable[..., Any], sets: list[tuple]) -> dict[str, float]:
    """The time that a call spends in each kernel, by the profiler; the longest first, empty where it records none."""
    import jax

    calls = 8
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = options.host_tracer_level = 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            for n in range(calls):
                out = run(*sets[n % len(sets)])
            jax.block_until_ready(out)
        times: collections.Counter[str] = collections.Counter()
        for path in Path(folder).rglob("*.xplane.pb"):
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines if plane.name.startswith("/device:GPU") else ():
                    if line.name.startswith("Stream"):
                        for event in line.events:
                            times[event.name] += event.duration_ns / 1e3 / calls
    return {name: round(time, 1) for name, time in times.most_common()}


def _bytes(tree: Any) -> int:
    import jax

    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def _prepare(task: dict) -> tuple:
    """The operation, its size, dtype, arguments and the positions of those that have gradients."""
    import jax.numpy as jnp

    from eval.chips import gpu_operations

    size = gpu_operations.Size(**task["size"])
    dtype = jnp.dtype(task["dtype"])
    arrays = gpu_operations.arrays(task["operation"], size, dtype)
    floats = tuple(n for n, x in enumerate(arrays) if jnp.issubdtype(x.dtype, jnp.floating))
    return gpu_operations.OPERATIONS[task["operation"]], size, dtype, arrays, floats


def check(task: dict, worker: Worker) -> Iterator[dict]:
    """The error of a result and of each gradient."""
    import jax
    import numpy as np

    from eval.harness.passes import both_passes

    operation, size, dtype, arrays, floats = _prepare(task)
    wide = tuple(x if np.issubdtype(x.dtype, np.integer) else np.asarray(x, np.float64) for x in arrays)
    oracle = functools.partial(operation.oracle, size)
    right = oracle(*wide)
    cotangent = np.asarray(np.random.default_rng(9).standard_normal(right.shape), dtype)
    both = both_passes(operation.call(size, _named(task, worker)), floats)
    # Float32 products in XLA are TF32 on a GPU unless they are asked for at their highest precision.
    with jax.default_matmul_precision("highest" if dtype == np.float32 else "default"):
        run, facts = compile_program(both, (cotangent, *arrays), _QUICK)
    out, *gradients = jax.device_get(run(cotangent, *arrays))
    errors = {"out": relative_error(out, right)}
    g = np.asarray(cotangent, np.float64)
    names = operation.kinds
    for position, gradient in zip(floats, gradients):
        errors[f"d{position}_{names[position]}"] = gradient_error(oracle, wide, position, g, gradient)
    worst = max(errors.values())
    most = TOLERANCE[task["dtype"]]
    yield {"errors": errors, "worst": worst, "most": most, "wrong": not worst <= most, **facts}


def _named(task: dict, worker: Worker) -> Implementation | None:
    """The implementation to ask for."""
    given = task["implementation"]
    if worker.interpret and given == "triton":
        return "triton_interpret"
    return None if given == "default" else given


def speed(task: dict, worker: Worker) -> Iterator[dict]:
    """The time of a call."""
    import jax.numpy as jnp

    from eval.chips import gpu_operations
    from eval.harness.passes import both_passes

    operation, size, dtype, _, floats = _prepare(task)
    function = operation.call(size, _named(task, worker))
    with_backward = task["passes"] == "both"

    def make(seed: int) -> tuple:
        given = gpu_operations.arrays(task["operation"], size, dtype, seed)
        return (gpu_operations.cotangent_of(function, given, dtype), *given) if with_backward else given

    first = make(0)
    run, facts = compile_program(both_passes(function, floats) if with_backward else function, first)
    # So many sets of inputs that they do not fit into the device's caches together.
    count = max(1, min(4, _ROTATED // max(_bytes(first), 1)))
    sets = [tuple(map(jnp.asarray, make(n))) for n in range(count)]
    moved = _bytes(first) + _bytes(run.out_info)
    took = worker.turn(lambda: seconds_a_call(run, sets))
    facts |= {"ms": took * 1e3, "tb_s": moved / took / 1e12}
    if "Triton" in facts["by"]:
        facts["kernels_us"] = worker.turn(lambda: kernel_microseconds(run, sets))
    if operation.products is not None:
        facts["tflop_s"] = operation.products(size) * (3.5 if with_backward else 1.0) / took / 1e12
    yield facts


def ceiling(task: dict, worker: Worker) -> Iterator[dict]:
    """What a copy and a matrix product reach."""
    import jax.numpy as jnp
    import numpy as np

    n = 8192
    x = jnp.asarray(
        np.resize(np.random.default_rng(0).standard_normal(1 << 20, np.float32), (n, n)), jnp.bfloat16
    )
    if task["operation"] == "matmul":
        run, facts = compile_program(jnp.matmul, (x, x), {})
        took = worker.turn(lambda: seconds_a_call(run, [(x, x)]))
        yield {**facts, "ms": took * 1e3, "tflop_s": 2 * n**3 / took / 1e12}
    else:
        x = jnp.tile(x, (8, 1))
        run, facts = compile_program(jnp.negative, (x,), _QUICK)
        took = worker.turn(lambda: seconds_a_call(run, [(x,)]))
        yield {**facts, "ms": took * 1e3, "tb_s": 2 * x.nbytes / took / 1e12}


def training(task: dict, worker: Worker) -> Iterator[dict]:
    """The first step of a small decoder, from its function to its result, and the steps after it."""
    import jax

    from eval.chips import gpu_operations

    size = gpu_operations.Size(**task["size"])
    step, arguments = gpu_operations.training_step(size)
    start = time.perf_counter()
    run, facts = compile_program(step, arguments, task["options"])
    value = jax.block_until_ready(run(*arguments))[0]
    first = time.perf_counter() - start
    took = worker.turn(lambda: seconds_a_call(run, [arguments]))
    yield {
        **facts,
        "first_step_s": first,
        "loss": float(value),
        "ms": took * 1e3,
        "wrong": not math.isfinite(value),
    }


def neighbours(tile: Any) -> list[Any]:
    """A dozen tilings around one: blocks, warps and stages a step away, alone and in pairs that keep the work."""
    others = "num_warps", "num_stages", "resident"
    blocks = [name for name in tile._fields if name not in others and getattr(tile, name)]
    changes: list[dict[str, float]] = [{}, {"num_warps": 2}, {"num_warps": 0.5}]
    if "resident" in tile._fields:
        changes += [{"resident": 2}, {"resident": 0.5}]
    for name in blocks:
        changes += [{name: 2}, {name: 0.5}, {name: 0.5, "num_warps": 0.5}]
    if len(blocks) > 1:
        changes += [{blocks[0]: 2, blocks[1]: 0.5}, {blocks[0]: 0.5, blocks[1]: 2}]
    found = []
    for stages in (0, 1, -1):
        for change in changes if stages == 0 else [{}]:
            new = tile._replace(**{name: int(getattr(tile, name) * by) for name, by in change.items()})
            new = new._replace(num_stages=new.num_stages + stages)
            fits = new.num_warps in (2, 4, 8, 16) and 1 <= new.num_stages <= 5 and getattr(new, "resident", 1)
            if fits and all(16 <= getattr(new, name) <= 256 for name in blocks) and new not in found:
                found.append(new)
    return found


def tune(task: dict, worker: Worker) -> Iterator[dict]:
    """The time of a call with each of a dozen tilings of one of its kernels."""
    import jax
    import jax.numpy as jnp

    from eval.chips import gpu_operations
    from eval.harness.passes import both_passes
    from pallas_kernels.triton.core.sizes import adjusted_tiles

    operation, size, dtype, arrays, floats = _prepare(task)
    function = operation.call(size, _named(task, worker))
    forward = task["passes"] == "forward"
    cotangent = gpu_operations.cotangent_of(function, arrays, dtype)
    arguments = tuple(map(jnp.asarray, arrays if forward else (cotangent, *arrays)))
    chosen: dict[str, Any] = {}

    def with_tile(family: str, tiles: Any, new: Any) -> Any:
        if family != task["family"]:
            return tiles
        chosen["default"] = getattr(tiles, task["kernel"])
        return tiles if new is None else tiles._replace(**{task["kernel"]: new})

    @jax.jit
    def differ(got: Any, right: Any) -> Any:
        pairs = [
            (a.astype(jnp.float32), b.astype(jnp.float32))
            for a, b in zip(*map(jax.tree.leaves, (got, right)))
        ]
        return jnp.stack([jnp.linalg.norm(a - b) / jnp.linalg.norm(b) for a, b in pairs]).max()

    right, tilings = None, [None]
    while tilings:
        new = tilings.pop(0)
        jax.clear_caches()  # traces keep the sizes that they were made with
        row: dict[str, Any] = {"tile": list(new) if new else None}
        try:
            with adjusted_tiles(functools.partial(with_tile, new=new)):
                program = function if forward else both_passes(function, floats)
                run, facts = compile_program(lambda *x, program=program: program(*x), arguments, _QUICK)
            got = jax.block_until_ready(run(*arguments))
            row |= {"ms": worker.turn(functools.partial(seconds_a_call, run, [arguments])) * 1e3, **facts}
            if new is None:
                default = chosen["default"]
                right, row["tile"], row["fields"] = got, list(default), list(default._fields)
                tilings = neighbours(default)[1:]
            else:
                row["worst"] = float(differ(got, right))
                row["wrong"] = not row["worst"] <= TOLERANCE[task["dtype"]]
        except Exception as error:
            if new is None:
                raise
            row["note"] = f"does not run: {_line(error, 80)}"
            _require_device()
        yield row


def _line(error: BaseException, most: int = 200) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:most]


def _require_device() -> None:
    """Ends the process where an earlier fault has left no usable device."""
    import jax
    import jax.numpy as jnp

    try:
        jax.block_until_ready(jnp.arange(4) + 1)
    except jax.errors.JaxRuntimeError:
        os._exit(3)


def hello() -> dict:
    """The device and the versions, or why the kernels cannot run here."""
    import importlib.metadata

    import jax

    from pallas_kernels.triton.core import bridge

    interpret = bridge.interprets()
    versions = {"triton": bridge.triton_version()}
    for name in ("jax", "jaxlib", "jax-triton", "nvidia-cudnn-cu13", "nvidia-cudnn-cu12"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    try:
        device = jax.devices("cpu" if interpret else "cuda")[0]
    except (RuntimeError, AssertionError) as error:  # no driver; no plugin
        why = _line(error, 160).rstrip(": ")
        return {"event": "refused", "why": f"JAX finds no NVIDIA GPU here ({why})"}
    refused = bridge.unsupported()
    if refused is not None:
        return {"event": "refused", "why": refused}
    capability = "interpreted" if interpret else str(device.compute_capability)
    return {"event": "hello", "device": device.device_kind, "capability": capability, "versions": versions}


KINDS = {"check": check, "speed": speed, "ceiling": ceiling, "training": training, "tune": tune}


def serve(greet: Callable[[], dict], run: Callable[[dict, Worker], Iterator[dict]]) -> None:
    """Serves the parent until it closes the pipe, or ends."""
    with contextlib.suppress(AttributeError):  # Linux alone has it
        ctypes.CDLL(None).prctl(
            1, signal.SIGKILL
        )  # PR_SET_PDEATHSIG: a stopped process would outlive its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not for the parent

    def send(message: dict) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    greeting = greet()
    send(greeting)
    if greeting["event"] == "refused":
        return
    worker = Worker(send, greeting.get("capability") == "interpreted")
    for line in iter(sys.stdin.readline, ""):
        task = json.loads(line)
        try:
            for row in run(task, worker):
                send({"event": "row", "row": {**task, **row}})
        except Exception as error:
            refused = isinstance(error, (NotImplementedError, ValueError))
            unavailable = refused and task.get("implementation") in ("triton", "cudnn")
            unavailable = unavailable or isinstance(error, ImportError)
            note = f"{'not available' if unavailable else 'FAILED'}: {_line(error)}"
            wrong = not unavailable and task["kind"] != "peer"
            send({"event": "row", "row": {**task, "note": note, "wrong": wrong}})
            if "jax" in sys.modules:
                _require_device()
        send({"event": "done"})


def main() -> None:
    """Checks and times our own kernels."""
    serve(hello, lambda task, worker: KINDS[task["kind"]](task, worker))


if __name__ == "__main__":
    main()
