"""What a training step takes on a TPU pod, planned without one: python -m eval.pod_plan PRESET --topology v5e:16x16.

Compiles the real step of the preset's task ahead of time for every chip of the topology, which takes the package libtpu
and no TPU. All options of the task's command work; `--context` is another name for `--length`. The exit status is 1 if
the step does not fit.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console

from brl_jax.sharding import row_shards
from eval.chips.program_costs import collective_bytes
from eval.chips.stages import stages
from eval.chips.tpu_chips import CHIPS, known_topologies, prepare_compiler
from eval.harness.table import Table
from train.cli.help import screen
from train.cli.options import parse
from train.cli.summary import mechanism_names, num_parameters
from train.engine.batch import Arrays, Batch, num_rows, num_tokens
from train.engine.errors import RunError, UserError, one_line
from train.engine.flops import matrix_flops
from train.engine.mesh import rows_sharding, training_programs
from train.engine.step import Objective, TrainState
from train.tasks.every import TASKS
from train.tasks.task import Task


def make_plan(
    task: Task[Any, Any], config: Any, topology: str, begin: Callable[[str], None]
) -> tuple[dict[str, Any], Mesh]:
    """Compiles a step; returns what it takes, and the mesh that it is compiled for.

    Bytes, operations and seconds are for one device. The numbers of parameters and tokens are for all together.
    `begin` is called with the name of each stage.
    """
    from jax.experimental import topologies

    started, chip = time.monotonic(), CHIPS[topology.partition(":")[0]]
    begin(f"describing {topology}")
    devices = topologies.get_topology_desc(platform="tpu", topology_name=topology).devices
    mesh = task.open_mesh(config, devices)
    objective = task.objective(task.build(config), config)
    loop = config.loop
    programs = training_programs(mesh, objective, config.optimizer, loop)
    state = jax.tree.map(_placed, jax.eval_shape(programs.fresh), programs.shardings)
    batch = {
        name: _placed(x, rows_sharding(mesh, loop.batch, len(x.shape)))
        for name, x in task.batch_shapes(config, loop.batch).items()
    }
    tokens = num_tokens(batch)
    reset = jax.ShapeDtypeStruct((), jnp.bool_, sharding=NamedSharding(mesh, PartitionSpec()))
    begin(f"tracing the step for {len(devices)} devices")
    kept = _kept_bytes(objective, state, task.batch_shapes(config, loop.microbatch), mesh)
    with jax.set_mesh(mesh):
        traced = programs.step.trace(state, Batch(batch, reset))
        begin("lowering the step")
        lowered = traced.lower()
        begin("compiling the step, which may take minutes")
        try:
            compiled = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            raise RunError(
                f"{topology}: {_why(error)}; {advice(config, mesh, kept, _share(state.params))}"
            ) from None
    begin("reading the compiled program")
    memory = compiled.memory_analysis()
    assert memory is not None
    parameters, gradients = _share(state.params), _share(objective.split(state.params)[0])
    total = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    )  # fmt: skip
    flops, received = matrix_flops(traced.jaxpr) / len(devices), collective_bytes(compiled.as_text())
    kept = min(kept, max(memory.temp_size_in_bytes - gradients, 0))
    seconds = {
        "matrix_seconds": flops / chip.flops,
        # The state and what the backward pass needs are written and read at least once.
        "hbm_seconds": 2 * (_share(state) + loop.accumulation * kept) / chip.memory_bandwidth,
        "link_seconds": sum(received.values()) / chip.link_bandwidth,
    }
    bound = max(seconds.values())  # the shortest possible step
    plan = {
        "topology": topology,
        "devices": len(devices),
        "mesh": dict(mesh.shape),
        "parameters": num_parameters(state.params),
        "parameter_bytes": parameters,
        "optimizer_bytes": _share(state.opt_state),
        "memory_bytes": _share(state.memory),
        "gradient_bytes": gradients,
        "activation_bytes": kept,
        "temporary_bytes": max(memory.temp_size_in_bytes - gradients - kept, 0),
        "program_bytes": memory.generated_code_size_in_bytes,
        "total_bytes": total,
        "hbm_bytes": int(chip.hbm),
        "matrix_flops": flops,
        "collective_bytes": received,
        **seconds,
        "tokens": tokens,
        "compile_seconds": time.monotonic() - started,
        "fits": total <= int(chip.hbm),
        "bound_seconds": bound,
        "matrix_share": seconds["matrix_seconds"] / bound,
        "tokens_per_second": tokens / bound,
    }
    return plan, mesh


def _placed(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _share(tree: Any) -> int:
    """Bytes of a pytree's arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _kept_bytes(objective: Objective, state: TrainState, batch: Arrays, mesh: Mesh) -> int:
    """Roughly the bytes that a microbatch's forward pass keeps for the backward pass on one device, without weights."""
    rows = num_rows(batch)
    memory = jax.eval_shape(lambda: objective.init_memory(rows))

    def residuals(params: Any, memory: Any, batch: Any, key: Any) -> Any:
        trained, frozen = objective.split(params)

        def loss(trained: Any) -> Any:
            return objective.sums(objective.join(trained, frozen), memory, batch, key)[0]["loss"]

        return jax.vjp(loss, trained)[1]

    kept = jax.eval_shape(residuals, state.params, memory, batch, jax.random.key(0))
    weights = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state.params)}
    size = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(kept)
        if (leaf.shape, leaf.dtype) not in weights
    )
    return size // (row_shards(mesh) * mesh.shape["sequence"])


def _why(error: BaseException) -> str:
    """Why the compiler refuses a program."""
    text = str(error)
    used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", text)
    return f"does not fit: {used[1]} of {used[2]} a chip" if used else f"does not compile: {one_line(error)}"


def advice(config: Any, mesh: Mesh, kept: int, parameters: int) -> str:
    """What to change for a step to take less memory."""
    loop, state = config.loop, 4 * parameters  # with two moments and the gradients
    ways = []
    if state > kept and row_shards(mesh) > mesh.shape["fsdp"]:
        ways.append(f"--mesh.fsdp {row_shards(mesh)} keeps one copy of parameters and optimiser")
    if config.model.remat != "full":
        ways.append("--remat full computes activations again")
    if config.model.dtype != "bfloat16":
        ways.append("--dtype bfloat16 halves activations")
    if loop.batch // loop.accumulation > row_shards(mesh):
        ways.append(f"--accumulation {loop.batch // row_shards(mesh)} takes fewer rows at a time")
    elif (config.model.num_kv_heads or config.model.num_heads) % (2 * mesh.shape["tensor"]) == 0:
        ways.append(f"--mesh.tensor {2 * mesh.shape['tensor']} shares each layer")
    return "to change: " + ("; ".join(ways) if ways else "more chips, or a shorter --context")


def show(plan: Mapping[str, Any], config: Any) -> None:
    """Prints a plan as tables."""
    console = Console(soft_wrap=True, highlight=False)
    shape = " x ".join(f"{axis} {size}" for axis, size in plan["mesh"].items())
    rows = config.loop.batch
    console.print(
        f"{plan['topology']}, {plan['devices']} devices as {shape}; {plan['parameters'] / 1e6:.1f}M parameters; "
        f"{rows} rows of {plan['tokens'] // rows} tokens; compiled in {plan['compile_seconds']:.0f} s"
    )
    table = Table("what", "GiB", title="memory of a device")
    parts = "parameter optimizer memory gradient activation temporary program total hbm"
    words = {"memory": "carried memory", "total": "peak, as compiled", "hbm": "the chip has"}
    for name in parts.split():
        table.add(words.get(name, name), f"{plan[f'{name}_bytes'] / 2**30:.3f}")
    console.print(table.for_terminal())
    table = Table("what", "amount", "ms", title="a step of one device, at least")
    moved = f"{sum(plan['collective_bytes'].values()) / 1e9:.3f} GB"
    flops = f"{plan['matrix_flops'] / 1e12:.3f} TFLOP"
    table.add("matrix products", flops, f"{1e3 * plan['matrix_seconds']:.2f}")
    table.add("memory", "", f"{1e3 * plan['hbm_seconds']:.2f}")
    table.add("links", moved, f"{1e3 * plan['link_seconds']:.2f}")
    for kind, size in sorted(plan["collective_bytes"].items()):
        table.add(f"  {kind}", f"{size / 1e9:.3f} GB", "")
    console.print(table.for_terminal())
    console.print(
        f"bound: {1e3 * plan['bound_seconds']:.2f} ms a step, {plan['tokens_per_second']:,.0f} tokens/s; "
        f"matrix products are {plan['matrix_share']:.0%} of it"
    )
    used = f"{plan['total_bytes'] / 2**30:.2f} of {plan['hbm_bytes'] / 2**30:.0f} GiB"
    console.print(f"fits: {used}" if plan["fits"] else f"does not fit: {used}")


def _first_screen(topology: str, presets: Mapping[str, Any], default: str, name: str, **texts: str) -> str:
    """What --help prints; see `train.cli.help.first_screen`."""
    config = presets[name]
    shown = [
        ("--topology KIND:SHAPE", f"the slice ({topology})"),
        ("--mechanism NAME", f"the attention of the layers ({mechanism_names(config.model)})"),
        ("--context N", "tokens of a row"),
        ("--batch N", f"rows of a step ({config.loop.batch})"),
        ("--mesh.fsdp N", "chips that share one copy of parameters and optimiser"),
        ("--mesh.sequence N", "chips that share a row (1)"),
        ("--remat KIND", f"what the backward pass computes again ({config.model.remat})"),
        ("--dtype NAME", f"of the computation ({config.model.dtype})"),
        ("--json", "prints one object"),
    ]
    examples = [
        "pod-1b --topology v5e:16x16 --batch 256",
        "pod-8b --topology v5e:16x16",
        "small --topology v5e:2x4 --batch 8 --json",
    ]
    return screen(presets, default, name, shown, examples, **texts)


class _Parser(argparse.ArgumentParser):
    """Its complaints are UserErrors."""

    def error(self, message: str) -> Any:
        raise UserError(message)


def main(argv: Sequence[str]) -> None:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("--topology", default="v5e:16x16")
    parser.add_argument("--json", action="store_true")
    options, rest = parser.parse_known_args(argv)
    kind, _, shape = options.topology.partition(":")
    if kind not in CHIPS or shape not in CHIPS[kind].topologies:
        raise UserError(f"--topology: unknown {options.topology!r}; expected one of {known_topologies()}")
    tasks = {task.config_class: task for task in TASKS.values()}
    config = parse(
        {name: preset for task in tasks.values() for name, preset in task.presets.items()},
        "wikitext103-brl",
        ["--length" if word == "--context" else word.replace("--context=", "--length=") for word in rest],
        prog="python -m eval.pod_plan",
        about="A training step on a TPU pod, planned without one.",
        screen=functools.partial(_first_screen, options.topology),
    )
    task = tasks[type(config)]
    config = task.sized(config)
    prepare_compiler()
    with stages("pod_plan") as begin:
        plan, mesh = make_plan(task, config, options.topology, begin)
    if options.json:
        print(json.dumps(plan))
    else:
        show(plan, config)
    if not plan["fits"]:
        ways = advice(config, mesh, plan["activation_bytes"], plan["parameter_bytes"])
        raise RunError(f"{options.topology}: does not fit; {ways}")
