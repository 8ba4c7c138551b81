"""The same training on many meshes, for each listed mechanism: python -m eval.mesh_check.

A small decoder with each mechanism takes the same steps on one device and, on eight devices of this machine's CPU, cut
in every way; once more with the eight in two processes. Printed is how far the losses are from those of one device,
relative to them, at the worst step. Exit status 1 where that is more than 1e-4.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from brl_jax.attention.core.checks import check_at_least
from brl_jax.layers import MECHANISMS, BilinearMLRConfig, BRLConfig, Mechanism
from brl_jax.models import DecoderConfig, DecoderLM
from brl_jax.sharding import MeshConfig, make_mesh
from train.config import LoopConfig, parse_options
from train.errors import RunError, command, one_line
from train.hosts import HostsConfig, is_lead, join
from train.mesh import host_rows, place_batch, training_programs
from train.optimizer import OptimizerConfig
from train.tasks.lm import lm_objective

_ROWS, _LENGTH, _VOCABULARY = 8, 64, 64
_CLOSE = 1e-4
_DEVICES = 8

_MESHES = {
    "data 8": MeshConfig(data=8),
    "fsdp 8": MeshConfig(fsdp=8),
    "data 2, fsdp 2, tensor 2": MeshConfig(data=2, fsdp=2, tensor=2),
    "sequence 8": MeshConfig(sequence=8),
}
_TWO = "fsdp 8 in two processes"
# Programs as small as these take longer to optimise than to run.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"

# Of the mechanisms' sizes, those that a row of 64 tokens is to show: several chunks, a window beyond a stretch of 8.
_SMALL = {
    "window": 12,
    "chunk_size": 8,
    "block_size": 8,
    "num_compressed": 4,
    "context": 8,
    "max_length": 2 * _LENGTH,
}


@dataclasses.dataclass(frozen=True)
class CheckOptions:
    """What to run."""

    mechanisms: tuple[str, ...] = ()
    """Names of listed mechanisms, and brl-layer for BRL with memory per layer; empty: all that have a causal form."""
    meshes: tuple[str, ...] = (*_MESHES, _TWO)
    """Which of the meshes."""
    steps: int = 20
    """Steps of each."""

    def __post_init__(self):
        for name, given, known in (
            ("mechanisms", self.mechanisms, candidates()),
            ("meshes", self.meshes, (*_MESHES, _TWO)),
        ):
            for word in given:
                if word not in known:
                    raise ValueError(f"{name} must be out of {', '.join(known)}, got {word!r}")
        check_at_least(self, "steps")


def candidates() -> dict[str, Mechanism]:
    """Small configurations of the mechanisms that have a causal form, by name."""
    every = {name: _small(config()) for name, config in MECHANISMS.items()}
    causal = {name: mechanism for name, mechanism in every.items() if mechanism.causal}
    brl = causal["brl"]
    assert isinstance(brl, BRLConfig)
    return causal | {
        # By default heads this small would have a level of two features, of which a LayerNorm leaves the sign alone:
        # rounding decides what is learned.
        "bilinear_mlr": BilinearMLRConfig(ranks=(4, 4)),
        "brl": dataclasses.replace(brl, block_size=16),
        "brl-layer": dataclasses.replace(brl, memory="layer", history_size=20),
    }


def _small(mechanism: Mechanism) -> Mechanism:
    names = {field.name for field in dataclasses.fields(mechanism)} & _SMALL.keys()
    # A size that says "auto" or "none" by default is no number to make smaller.
    sizes = {name: _SMALL[name] for name in names if isinstance(getattr(mechanism, name), int)}
    return dataclasses.replace(mechanism, **sizes)


def losses(mechanism: Mechanism, mesh: Mesh, steps: int) -> list[float]:
    """The loss of each training step on a mesh, in float32."""
    model = DecoderLM(
        DecoderConfig(
            num_layers=2 * mechanism.group,
            d_model=32,
            num_heads=4,
            d_ff=64,
            vocab_size=_VOCABULARY,
            mechanism=mechanism,
        )
    )
    settings = OptimizerConfig(learning_rate=3e-3, warmup_steps=2)
    taken = []
    with jax.set_mesh(mesh):
        programs = training_programs(
            mesh, lm_objective(model), settings, LoopConfig(batch=_ROWS, steps=steps)
        )
        state = programs.fresh()
        for i in range(steps):
            # A text that can be learned: each token follows from the one before it, three times out of four.
            rng = np.random.default_rng([5, i])
            text = rng.integers(_VOCABULARY, size=(_ROWS, _LENGTH + 1)).astype(np.int32)
            for t in range(1, _LENGTH + 1):
                text[:, t] = np.where(
                    rng.random(_ROWS) < 0.75, (text[:, t - 1] * 5 + 1) % _VOCABULARY, text[:, t]
                )
            held = text[host_rows(mesh, _ROWS)]
            batch = {"tokens": held[:, :-1], "targets": held[:, 1:], "reset": np.bool_(i == 0)}
            state, metrics = programs.step(state, place_batch(mesh, batch, _ROWS))
            taken.append(float(metrics["loss"]))
    return taken


def work(request: str) -> None:
    """In a process of its own, whose devices are set: a line of JSON for each mechanism on each mesh of `request`."""
    told = json.loads(request)
    join(HostsConfig(**told["hosts"]))
    mechanisms = candidates()
    for name in told["mechanisms"]:
        for where in told["meshes"]:
            answer: dict[str, Any] = {"mechanism": name, "mesh": where}
            try:
                one = where == "one"
                config = MeshConfig() if one else _MESHES[where.partition(" in ")[0]]
                mesh = make_mesh(config, jax.devices()[:1] if one else None)
                answer["losses"] = losses(mechanisms[name], mesh, told["steps"])
            except Exception as error:  # told in its place of the table; the others go on
                answer["error"] = one_line(error)
            if is_lead():
                print(json.dumps(answer), flush=True)


def _run(request: dict[str, Any], devices: int) -> Iterator[dict[str, Any]]:
    """What a process with so many CPU devices answers."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} {_QUICK}".strip()
    settings = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices), "XLA_FLAGS": flags}
    line = [
        sys.executable,
        "-c",
        "import sys; from eval.mesh_check import work; work(sys.argv[1])",
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


def _all_answers(request: dict[str, Any]) -> list[dict[str, Any]]:
    return list(_run(request, _DEVICES // 2))


def _run_two(request: dict[str, Any]) -> list[dict[str, Any]]:
    """What two processes with four devices each answer together."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    hosts = [{"coordinator": f"127.0.0.1:{port}", "processes": 2, "process": process} for process in range(2)]
    with concurrent.futures.ThreadPoolExecutor() as pool:
        runs = [pool.submit(_all_answers, request | {"hosts": h}) for h in hosts]
        return runs[0].result() + runs[1].result()


def difference(answer: dict[str, Any], one: dict[str, Any]) -> float | str:
    """How far the losses of an answer are from those of one device, relative to them; what went wrong, if anything."""
    for either in (one, answer):
        if "error" in either:
            return either["error"]
    expected = np.asarray(one["losses"])
    found = float(np.max(np.abs(np.asarray(answer["losses"]) - expected) / np.abs(expected)))
    return found if np.isfinite(found) else "not finite"


def main(argv: Sequence[str]) -> None:
    """Prints the table; see the module's text and --help."""
    options = parse_options(
        CheckOptions(), argv, prog="python -m eval.mesh_check", about="The same losses on every mesh."
    )
    names = options.mechanisms or tuple(candidates())
    here = [where for where in options.meshes if where != _TWO]
    request = {"mechanisms": names, "meshes": ["one", *here], "steps": options.steps, "hosts": {}}
    answers: dict[tuple[str, str], dict[str, Any]] = {}
    for answer in _run(request, _DEVICES):
        answers[answer["mechanism"], answer["mesh"]] = answer
        far = difference(answer, answers[answer["mechanism"], "one"])
        print(f"{answer['mechanism']}, {answer['mesh']}: {far}", file=sys.stderr, flush=True)
    if _TWO in options.meshes:
        for answer in _run_two(request | {"meshes": [_TWO]}):
            answers[answer["mechanism"], answer["mesh"]] = answer
    failed = []
    print(f"| mechanism | loss | {' | '.join(options.meshes)} |")
    print("|---|---|" + "---|" * len(options.meshes))
    for name in names:
        one = answers[name, "one"]
        cells = [difference(answers[name, where], one) for where in options.meshes]
        failed += [name for cell in cells if not isinstance(cell, float) or cell > _CLOSE]
        words = " | ".join(f"{cell:.0e}" if isinstance(cell, float) else cell for cell in cells)
        fell = f"{one['losses'][0]:.2f} to {one['losses'][-1]:.2f}" if "losses" in one else "none"
        print(f"| {name} | {fell} | {words} |")
    if failed:
        raise RunError(f"losses differ by more than {_CLOSE}: {', '.join(dict.fromkeys(failed))}")


if __name__ == "__main__":
    sys.exit(command(main, "eval.mesh_check"))
