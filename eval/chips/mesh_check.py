"""The same training on many meshes, for each listed mechanism: python -m eval.mesh_check [--task NAME].

A small model of the task with each mechanism takes the same steps on one device and on eight devices of this machine's
CPU, sharded in every way, and once more with the eight devices in two processes. The table shows the largest relative
difference of a step's loss from the loss on one device. The exit status is 1 if one is more than 1e-4.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from brl_jax.attention.core.checks import check_choice
from brl_jax.fields import Checked, Steps
from brl_jax.layers import MECHANISMS, BilinearMLRConfig, BRLConfig, Mechanism
from brl_jax.sharding import MeshConfig, make_mesh
from eval.harness.batches import make_batch
from eval.harness.options import check_names, command
from eval.harness.table import Table
from train.cli.options import parse
from train.engine.errors import RunError, one_line
from train.engine.hosts import HostsConfig, is_lead, join
from train.engine.mesh import host_rows, place_batch, training_programs
from train.engine.optimizer import OptimizerConfig
from train.tasks.every import TASKS
from train.tasks.task import Task

_ROWS = 8
_CLOSE = 1e-4
_DEVICES = 8

_MESHES = {
    "data 8": MeshConfig(data=8),
    "fsdp 8": MeshConfig(fsdp=8),
    "data 2, fsdp 2, tensor 2": MeshConfig(data=2, fsdp=2, tensor=2),
    "sequence 8": MeshConfig(sequence=8),
}
_TWO = "fsdp 8 in two processes"
# XLA's CPU client runs all devices in one pool, by default with a thread for each core, and a collective holds its
# thread until all devices have reached it. With fewer cores than devices, waiting collectives can hold all threads and
# starve what they wait for; after 40 seconds XLA then ends the process.
_THREADS = "32"
# Programs as small as these take longer to optimise than to run.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

# The options that make a task's default preset small, with rows of 64 tokens.
_OPTIONS = {
    "lm": "--length 64 --tokenizer chars:max=64",
    "lra": "--length 64 --buckets 64",
    "lra_denoise": "--length 64 --buckets 64",
    "lra_trace": "",  # its rows are images of 1,024 pixels
    "mlm": "--length 64 --tokenizer chars:max=62",
    "glue": "--length 64",
    "graph": "",
    "copy": "--length 64 --min_length 64",
    "recall": "--length 64",
    "regression": "--pairs 32 --input_dim 4 --mup_base_width 32",
    "forecast": "--lookback 32 --horizon 32 --split 96 96 96",
    "forecast_tokens": "--lookback 32 --horizon 32 --split 96 96 96 --bins 64",
}
# The mechanisms' sizes that fit a row of 64 tokens: several chunks, and a window longer than the 8 tokens of a device.
_SMALL = {
    "window": 12,
    "chunk_size": 8,
    "block_size": 8,
    "num_compressed": 4,
    "num_landmarks": 8,
    "num_samples": 8,
    "context": 8,
    "max_length": 128,
}


@dataclasses.dataclass(frozen=True)
class CheckOptions(Checked):
    """What to run."""

    task: str = "lm"
    """The task that is trained."""
    mechanisms: tuple[str, ...] = ()
    """Names of listed mechanisms, and brl-layer for BRL with memory per layer; by default all that support the task."""
    meshes: tuple[str, ...] = (*_MESHES, _TWO)
    """Which of the meshes."""
    steps: Steps = 20
    """Steps of each."""

    def __post_init__(self):
        check_choice("task", self.task, tuple(TASKS))
        check_names(self, mechanisms=candidates(TASKS[self.task]), meshes=(*_MESHES, _TWO))


def candidates(task: Task[Any, Any] = TASKS["lm"]) -> dict[str, Mechanism]:
    """Small configurations of the mechanisms that support a task, by name."""
    every = {name: _small(config()) for name, config in MECHANISMS.items()}
    brl = every["brl"]
    assert isinstance(brl, BRLConfig)
    every |= {
        # With heads this small the default has a level of two features, and a LayerNorm leaves only their sign:
        # rounding would decide what is learned.
        "bilinear_mlr": BilinearMLRConfig(ranks=(4, 4)),
        "brl": dataclasses.replace(brl, block_size=16, history_size=16, memory="output"),
        "brl-layer": dataclasses.replace(brl, history_size=20),
    }
    return {name: mechanism for name, mechanism in every.items() if small_config(task, mechanism) is not None}


def small_config(task: Task[Any, Any], mechanism: Mechanism) -> Any:
    """A small configuration of a task with a mechanism; None if the mechanism does not support the task."""
    config = _default_config(task.name)
    try:
        sizes: dict[str, Any] = {"d_model": 32, "num_heads": 4, "d_ff": 64, "dropout": 0.0}
        layers = 2 * mechanism.group
        model = dataclasses.replace(config.model, num_layers=layers, mechanism=mechanism, **sizes)
    except ValueError:
        return None
    optimizer = OptimizerConfig(learning_rate=3e-3, warmup_steps=2)
    return task.sized(dataclasses.replace(config, model=model, optimizer=optimizer))


@functools.cache
def _default_config(task: str) -> Any:
    options = f"--batch {_ROWS} --accumulation 1 {_OPTIONS[task]}"
    return parse(TASKS[task].presets, TASKS[task].default_preset, options.split(), prog="", about="")


def _small(mechanism: Mechanism) -> Mechanism:
    names = {field.name for field in dataclasses.fields(mechanism)} & _SMALL.keys()
    # A size whose default is not a number stays as it is.
    sizes = {name: _SMALL[name] for name in names if isinstance(getattr(mechanism, name), int)}
    return dataclasses.replace(mechanism, **sizes)


def losses(task: Task[Any, Any], mechanism: Mechanism, mesh: Mesh, steps: int) -> list[float]:
    """The loss of each training step on a mesh, in float32."""
    config = small_config(task, mechanism)
    config = dataclasses.replace(config, loop=dataclasses.replace(config.loop, steps=steps))
    own = host_rows(mesh, _ROWS)
    taken = []
    with jax.set_mesh(mesh):
        objective = task.objective(task.model(config), config)
        programs = training_programs(mesh, objective, config.optimizer, config.loop)
        state = programs.fresh()
        for step in range(steps):
            batch = make_batch(task, config, step)
            batch = batch.with_arrays(**{name: x[own] for name, x in batch.arrays.items()})
            state, metrics = programs.step(state, place_batch(mesh, batch, _ROWS))
            taken.append(float(metrics["loss"]))
    return taken


def work(request: str) -> None:
    """The main function of a worker process; prints a line of JSON for each mechanism and mesh."""
    asked = json.loads(request)
    join(HostsConfig(**asked["hosts"]))
    task = TASKS[asked["task"]]
    mechanisms = candidates(task)
    for name in asked["mechanisms"]:
        for where in asked["meshes"]:
            answer: dict[str, Any] = {"mechanism": name, "mesh": where}
            try:
                one = where == "one"
                config = MeshConfig() if one else _MESHES[where.partition(" in ")[0]]
                mesh = make_mesh(config, jax.devices()[:1] if one else None)
                answer["losses"] = losses(task, mechanisms[name], mesh, asked["steps"])
            except Exception as error:  # reported in its cell of the table; the others continue
                answer["error"] = one_line(error)
            if is_lead():
                print(json.dumps(answer), flush=True)


def _run(request: dict[str, Any], devices: int) -> Iterator[dict[str, Any]]:
    """The answers of a process with this many CPU devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}".strip()
    settings = {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "PJRT_NPROC": _THREADS,
        "XLA_FLAGS": flags,
    }
    line = [
        sys.executable,
        "-c",
        "import sys; from eval.chips.mesh_check import work; work(sys.argv[1])",
        json.dumps(request),
    ]
    with subprocess.Popen(
        line, env=os.environ | settings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        with concurrent.futures.ThreadPoolExecutor() as pool:
            complaint = pool.submit(process.stderr.read)
            yield from (json.loads(text) for text in process.stdout if text.startswith("{"))
        if process.wait():
            raise RunError(f"a process ended: {' '.join(complaint.result().split())[-300:]}")


def _run_two(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The answers of two processes that have four devices each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = [{"coordinator": f"127.0.0.1:{port}", "processes": 2, "process": process} for process in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(list, _run(request | {"hosts": h}, _DEVICES // 2)) for h in hosts]
        return runs[0].result() + runs[1].result()


def difference(answer: dict[str, Any], one: dict[str, Any]) -> float | str:
    """The largest relative difference of an answer's losses from the losses of one device; or the error, if any."""
    for either in (one, answer):
        if "error" in either:
            return either["error"]
    expected = np.asarray(one["losses"])
    found = float(np.max(np.abs(np.asarray(answer["losses"]) - expected) / np.abs(expected)))
    return found if np.isfinite(found) else "not finite"


@command(CheckOptions(), "eval.mesh_check", "The same losses on every mesh.")
def main(options: CheckOptions) -> None:
    names = options.mechanisms or tuple(candidates(TASKS[options.task]))
    here = [where for where in options.meshes if where != _TWO]
    request: dict[str, Any] = {"task": options.task, "mechanisms": names, "meshes": ["one", *here]}
    request |= {"steps": options.steps, "hosts": {}}
    answers: dict[tuple[str, str], dict[str, Any]] = {}
    for answer in _run(request, _DEVICES):
        answers[answer["mechanism"], answer["mesh"]] = answer
        far = difference(answer, answers[answer["mechanism"], "one"])
        print(f"{answer['mechanism']}, {answer['mesh']}: {far}", file=sys.stderr, flush=True)
    if _TWO in options.meshes:
        for answer in _run_two(request | {"meshes": [_TWO]}):
            answers[answer["mechanism"], answer["mesh"]] = answer
    failed = []
    table = Table("mechanism", "loss", *options.meshes)
    for name in names:
        one = answers[name, "one"]
        cells = [difference(answers[name, where], one) for where in options.meshes]
        failed += [name for cell in cells if not isinstance(cell, float) or cell > _CLOSE]
        words = (f"{cell:.0e}" if isinstance(cell, float) else cell for cell in cells)
        fell = f"{one['losses'][0]:.2f} to {one['losses'][-1]:.2f}" if "losses" in one else "none"
        table.add(name, fell, *words)
    table.show()
    if failed:
        raise RunError(f"losses differ by more than {_CLOSE}: {', '.join(dict.fromkeys(failed))}")
