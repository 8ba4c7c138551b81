"""What a training step takes on a TPU pod that is not there: python -m eval.pod_plan PRESET --topology v5e:16x16.

The real step of `train.lm`, or of `train.lra` for a preset of the Long Range Arena, is compiled ahead of time for every
chip of the topology (it needs the package libtpu and no TPU): all options of that command hold, `--mesh.fsdp 16`,
`--batch 256`, `--remat full`; `--context` is another word for `--length`. Printed are the memory of a chip beside what
it has, the matrix products, the bytes that each kind of communication brings to a chip, and the shortest time that any
of them allows the step. Exit status 1 where it does not fit. `--json` prints one object instead.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from rich.console import Console
from rich.table import Table

from brl_jax.sharding import row_shards
from eval.program_costs import collective_bytes, matrix_flops
from eval.tpu_chips import CHIPS, Chip, known_topologies
from train import lm, lra
from train.config import LmConfig, parse
from train.errors import RunError, UserError, command, one_line
from train.lra_config import LraConfig
from train.mesh import open_mesh, rows_sharding, training_programs
from train.step import Objective, TrainState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Slice:
    """Where a run would be."""

    topology: str = "v5e:16x16"
    """The slice: KIND:SHAPE, for example v5e:16x16 or v5p:4x4x4."""
    json: bool = False
    """Print one JSON object."""

    def check_topology(self) -> None:
        """Raises UserError for a slice that there is not."""
        kind, _, shape = self.topology.partition(":")
        if kind not in CHIPS or shape not in CHIPS[kind].topologies:
            raise UserError(f"--topology: unknown {self.topology!r}; expected one of {known_topologies()}")

    @property
    def chip(self) -> Chip:
        """The chips of the topology."""
        return CHIPS[self.topology.partition(":")[0]]


@dataclasses.dataclass(frozen=True)
class LmPlanConfig(LmConfig, Slice):
    """A run of train.lm, and where it would be."""

    def __post_init__(self):
        super().__post_init__()
        self.check_topology()


@dataclasses.dataclass(frozen=True)
class LraPlanConfig(LraConfig, Slice):
    """A run of train.lra, and where it would be."""

    def __post_init__(self):
        self.check_topology()


PlanConfig = LmPlanConfig | LraPlanConfig


@dataclasses.dataclass(frozen=True)
class Plan:
    """Of one step, on one device where nothing else is said; bytes and seconds."""

    topology: str
    devices: int
    mesh: dict[str, int]
    parameters: int
    parameter_bytes: int
    optimizer_bytes: int
    memory_bytes: int
    gradient_bytes: int
    activation_bytes: int
    temporary_bytes: int
    program_bytes: int
    total_bytes: int
    hbm_bytes: int
    matrix_flops: float
    collective_bytes: dict[str, float]
    matrix_seconds: float
    hbm_seconds: float
    link_seconds: float
    tokens: int
    compile_seconds: float

    @property
    def fits(self) -> bool:
        return self.total_bytes <= self.hbm_bytes

    @property
    def bound_seconds(self) -> float:
        """No step is shorter than the longest of what must happen in it."""
        return max(self.matrix_seconds, self.hbm_seconds, self.link_seconds)

    @property
    def matrix_share(self) -> float:
        """Of that time, how much the matrix units need."""
        return self.matrix_seconds / self.bound_seconds

    @property
    def tokens_per_second(self) -> float:
        """Of all devices, at that time."""
        return self.tokens / self.bound_seconds

    def to_json(self) -> dict[str, Any]:
        """All of it."""
        names = ("fits", "bound_seconds", "matrix_share", "tokens_per_second")
        return dataclasses.asdict(self) | {name: getattr(self, name) for name in names}


def vocabulary(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary, as its name says it. Raises UserError where it doesn't."""
    if tokenizer == "bytes":
        return 256
    size = re.fullmatch(r"(?:bpe:|words:max=)(\d+)", tokenizer)
    if size is None:
        raise UserError(
            f"--tokenizer: expected bytes, bpe:SIZE or words:max=SIZE, which say their size, got {tokenizer!r}"
        )
    return int(size[1])


def sized(config: PlanConfig) -> PlanConfig:
    """The configuration with what the data decide of the network."""
    if isinstance(config, LraPlanConfig):
        return cast(LraPlanConfig, lra.for_task(config))
    model = dataclasses.replace(config.model, vocab_size=vocabulary(config.data.tokenizer))
    return dataclasses.replace(config, model=model)


def make_objective(config: PlanConfig) -> Objective:
    """What the step lowers."""
    if isinstance(config, LraPlanConfig):
        return lra.lra_objective(lra.build_model(config))
    return lm.lm_objective(lm.build_model(config))


def batch_shapes(config: PlanConfig, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
    """What a step, or a part of it with so many rows, takes."""
    if isinstance(config, LraPlanConfig):
        return lra.batch_shapes(config, rows)
    tokens = jax.ShapeDtypeStruct((rows, config.loop.length), jnp.int32)
    return {"tokens": tokens, "targets": tokens}


def make_plan(config: PlanConfig) -> tuple[Plan, Mesh]:
    """Compiles the step and adds up; the mesh it is compiled for.

    Raises:
      UserError: a mesh that doesn't divide what it shares. RunError: the program does not compile, or not within the
      chip's memory; says how much it takes.
    """
    from jax.experimental import topologies

    started = time.monotonic()
    devices = topologies.get_topology_desc(platform="tpu", topology_name=config.topology).devices
    length = config.loop.length if isinstance(config, LmPlanConfig) else None
    mesh = open_mesh(config.mesh, config.loop, config.model, devices, length=length)
    objective = make_objective(config)
    loop = config.loop
    programs = training_programs(mesh, objective, config.optimizer, loop)
    state = jax.tree.map(_placed, jax.eval_shape(programs.fresh), programs.shardings)
    batch = {
        name: _placed(x, rows_sharding(mesh, loop.batch, len(x.shape)))
        for name, x in batch_shapes(config, loop.batch).items()
    }
    tokens = math.prod(batch["tokens"].shape)
    if isinstance(config, LmPlanConfig):
        batch["reset"] = jax.ShapeDtypeStruct((), jnp.bool_, sharding=NamedSharding(mesh, PartitionSpec()))
    kept = _kept_bytes(objective, state, config, mesh)
    with jax.set_mesh(mesh):
        traced = programs.step.trace(state, batch)
        try:
            compiled = traced.lower().compile()
        except jax.errors.JaxRuntimeError as error:
            raise RunError(
                f"{config.topology}: {_why(error)}; {advice(config, mesh, kept, _share(state.params))}"
            ) from None
    memory = compiled.memory_analysis()
    assert memory is not None
    parameters, gradients = _share(state.params), _share(state.params)
    total = (
        memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        + memory.temp_size_in_bytes + memory.generated_code_size_in_bytes
    )  # fmt: skip
    flops, received = matrix_flops(traced.jaxpr) / len(devices), collective_bytes(compiled.as_text())
    kept = min(kept, max(memory.temp_size_in_bytes - gradients, 0))
    plan = Plan(
        topology=config.topology,
        devices=len(devices),
        mesh=dict(mesh.shape),
        parameters=sum(leaf.size for leaf in jax.tree.leaves(state.params)),
        parameter_bytes=parameters,
        optimizer_bytes=_share(state.opt_state),
        memory_bytes=_share(state.memory),
        gradient_bytes=gradients,
        activation_bytes=kept,
        temporary_bytes=max(memory.temp_size_in_bytes - gradients - kept, 0),
        program_bytes=memory.generated_code_size_in_bytes,
        total_bytes=total,
        hbm_bytes=int(config.chip.hbm),
        matrix_flops=flops,
        collective_bytes=received,
        matrix_seconds=flops / config.chip.flops,
        # At the least, the state is read and written, and so is what the backward pass needs.
        hbm_seconds=2 * (_share(state) + loop.accumulation * kept) / config.chip.memory_bandwidth,
        link_seconds=sum(received.values()) / config.chip.link_bandwidth,
        tokens=tokens,
        compile_seconds=time.monotonic() - started,
    )
    return plan, mesh


def _placed(shape: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=sharding)


def _share(tree: Any) -> int:
    """Bytes of a tree's arrays on one device."""
    leaves = jax.tree.leaves(tree)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def _kept_bytes(objective: Objective, state: TrainState, config: PlanConfig, mesh: Mesh) -> int:
    """About what a microbatch's forward pass keeps for the backward pass on one device, weights left out."""
    rows = config.loop.batch // config.loop.accumulation
    memory = jax.eval_shape(lambda: objective.init_memory(rows))

    def residuals(params: Any, memory: Any, batch: Any, key: Any) -> Any:
        def loss(params: Any) -> Any:
            return objective.sums(params, memory, batch, key)[0]["loss"]

        return jax.vjp(loss, params)[1]

    kept = jax.eval_shape(residuals, state.params, memory, batch_shapes(config, rows), jax.random.key(0))
    weights = {(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(state.params)}
    size = sum(
        leaf.size * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(kept)
        if (leaf.shape, leaf.dtype) not in weights
    )
    return size // (row_shards(mesh) * mesh.shape["sequence"])


def _why(error: BaseException) -> str:
    """What the compiler says of a program that it refuses."""
    text = str(error)
    used = re.search(r"Used ([\d.]+\w) of ([\d.]+\w) hbm", text)
    return f"does not fit: {used[1]} of {used[2]} a chip" if used else f"does not compile: {one_line(error)}"


def advice(config: PlanConfig, mesh: Mesh, kept: int, parameters: int) -> str:
    """What to change so that a step takes less memory."""
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
    elif config.model.num_heads % (2 * mesh.shape["tensor"]) == 0:
        ways.append(f"--mesh.tensor {2 * mesh.shape['tensor']} shares each layer")
    return "to change: " + ("; ".join(ways) if ways else "more chips, or a shorter --context")


def show(plan: Plan, config: PlanConfig) -> None:
    """Prints a plan for people."""
    console = Console(soft_wrap=True, highlight=False)
    shape = " x ".join(f"{axis} {size}" for axis, size in plan.mesh.items())
    rows = config.loop.batch
    console.print(
        f"{plan.topology}, {plan.devices} devices as {shape}; {plan.parameters / 1e6:.1f}M parameters; "
        f"{rows} rows of {plan.tokens // rows} tokens; compiled in {plan.compile_seconds:.0f} s"
    )
    table = Table(title="memory of a device")
    table.add_column("what")
    table.add_column("GiB", justify="right")
    for name in (
        "parameter",
        "optimizer",
        "memory",
        "gradient",
        "activation",
        "temporary",
        "program",
        "total",
        "hbm",
    ):
        words = {"memory": "carried memory", "total": "peak, as compiled", "hbm": "the chip has"}.get(
            name, name
        )
        table.add_row(words, f"{getattr(plan, f'{name}_bytes') / 2**30:.3f}")
    console.print(table)
    table = Table(title="a step of one device, at the least")
    for column in ("what", "amount", "ms"):
        table.add_column(column, justify="left" if column == "what" else "right")
    table.add_row(
        "matrix products", f"{plan.matrix_flops / 1e12:.3f} TFLOP", f"{1e3 * plan.matrix_seconds:.2f}"
    )
    table.add_row("memory", "", f"{1e3 * plan.hbm_seconds:.2f}")
    table.add_row(
        "links", f"{sum(plan.collective_bytes.values()) / 1e9:.3f} GB", f"{1e3 * plan.link_seconds:.2f}"
    )
    for kind, size in sorted(plan.collective_bytes.items()):
        table.add_row(f"  {kind}", f"{size / 1e9:.3f} GB", "")
    console.print(table)
    console.print(
        f"bound: {1e3 * plan.bound_seconds:.2f} ms a step, {plan.tokens_per_second:,.0f} tokens/s; "
        f"matrix products are {plan.matrix_share:.0%} of it"
    )
    used = f"{plan.total_bytes / 2**30:.2f} of {plan.hbm_bytes / 2**30:.0f} GiB"
    console.print(f"fits: {used}" if plan.fits else f"does not fit: {used}")


def main(argv: Sequence[str]) -> None:
    """Prints the plan; see the module's text and --help."""
    words = ["--length" if word == "--context" else word.replace("--context=", "--length=") for word in argv]
    if "--json" in words and words[words.index("--json") + 1 : words.index("--json") + 2] not in (
        ["True"],
        ["False"],
    ):
        words.insert(words.index("--json") + 1, "True")
    kinds: dict[Any, Any] = {LmPlanConfig: lm.PRESETS, LraPlanConfig: lra.PRESETS}
    presets: dict[str, PlanConfig] = {
        name: kind(**{field.name: getattr(preset, field.name) for field in dataclasses.fields(preset)})
        for kind, known in kinds.items()
        for name, preset in known.items()
    }
    config = parse(
        presets,
        "wikitext103-brl",
        words,
        prog="python -m eval.pod_plan",
        about="What a training step takes on a TPU pod, without one.",
    )
    config = sized(config)
    if importlib.util.find_spec("libtpu") is None:
        raise UserError("libtpu is not installed: pip install 'brl-jax[tpu]'")
    os.environ |= {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    plan, mesh = make_plan(config)
    if config.json:
        print(json.dumps(plan.to_json()))
    else:
        show(plan, config)
    if not plan.fits:
        raise RunError(
            f"{config.topology}: does not fit; {advice(config, mesh, plan.activation_bytes, plan.parameter_bytes)}"
        )


if __name__ == "__main__":
    sys.exit(command(main, "eval.pod_plan"))
