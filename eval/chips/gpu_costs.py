"""What the GPU kernels cost, by the compiler's own counts and without a GPU: python -m eval.gpu_costs.

Compiles operations, mechanisms and training steps for an A100, an H100 and a B200, and prints a table of each
(docs/gpu.md). Needs `pip install '.[gpu]'` (the CUDA plugin brings its assembler), but no driver and no device. The
exit status is 1 if a kernel spills or does not compile, or if a program exceeds one of the limits in `MOST`,
`TEMPORARY`, `MOST_PRODUCTS` and `eval.chips.gpu_mechanisms`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from brl_jax.attention.local.patterns import SlidingWindow
from brl_jax.fields import Checked, Count, Length, Width
from brl_jax.layers import MECHANISMS
from brl_jax.models import DecoderConfig, DecoderLM
from eval.chips import gpu_mechanisms
from eval.chips.program_costs import array_bytes, computations, trips
from eval.chips.ptxas import find_assembler
from eval.harness.options import check_names, command
from eval.harness.passes import both_passes
from eval.harness.table import Table
from train.cli.command import switch_off
from train.engine.errors import RunError, UserError


@dataclasses.dataclass(frozen=True)
class Target:
    """A GPU as XLA describes it; figures of the public data sheets."""

    capability: int
    multiprocessors: int
    shared_memory: int
    shared_memory_block: int
    l2_cache: int
    bandwidth: int
    memory: int
    clock: float
    units: int
    architecture: str

    def description(self, name: str) -> str:
        """The text form of XLA's GpuTargetConfigProto."""
        major, minor = divmod(self.capability, 10)
        extension = "NONE" if major < 9 else "ACCELERATED_FEATURES"
        return f"""
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  core_count: {self.multiprocessors} fpus_per_core: {self.units}
  shared_memory_per_block: 49152 shared_memory_per_core: {self.shared_memory}
  shared_memory_per_block_optin: {self.shared_memory_block}
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  thread_dim_limit_x: 1024 thread_dim_limit_y: 1024 thread_dim_limit_z: 64
  memory_bandwidth: {self.bandwidth} l2_cache_size: {self.l2_cache} clock_rate_ghz: {self.clock}
  device_memory_size: {self.memory}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {extension} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 patch: 0 }}
device_description_str: "NVIDIA {name.upper()}"
"""


TARGETS = {
    "a100": Target(80, 108, 167936, 166912, 41943040, 2039040000000, 85100068864, 1.41, 64, "sm_80"),
    "h100": Target(90, 132, 233472, 232448, 52428800, 3352320000000, 84942979072, 1.98, 128, "sm_90a"),
    "b200": Target(100, 148, 233472, 232448, 132644864, 7672320000000, 191514411008, 1.965, 128, "sm_100a"),
}


#: The most launches of our kernels for an operation, forward and with the backward pass, and the most bytes of its
#: forward pass over the least possible. compress merges the results of its blocks, so its bytes depend on the length.
MOST = {
    "local": (1, 3, 1.1),
    "compress": (6, 12, math.inf),
    "compress_blocks": (4, 10, 2.2),
    "propagate": (1, 6, 1.1),
    "selected": (1, 40, 1.1),
    "squared_relu": (1, 6, 1.1),
    "sum": (3, 8, 3.0),
    "sum_decay": (3, 8, 3.0),
    "sum_feature_decay": (3, 7, 3.0),
    "delta": (3, 9, 3.0),
    "delta_decay": (3, 9, 3.0),
    "delta_feature_decay": (3, 9, 3.0),
}
OPERATIONS = tuple(MOST)
#: The most temporary bytes of a recurrence for each number in its queries, forward and with the backward pass: 150 and
#: 300 MiB for 16,384 tokens of 8 heads of 128.
TEMPORARY = {"forward": 9.375, "forward + backward": 18.75}


#: The mechanisms of the training steps; the ratios of their table are to the first.
NETWORKS = ("full", "local", "brl", "gated_deltanet", "mamba2")
#: The most products that XLA tunes, over full attention's. It times several forms of each matrix product outside
#: kernels when it compiles for a device that is there, and that is most of the wait for the first step.
MOST_PRODUCTS = 2.0


@dataclasses.dataclass(frozen=True)
class CostOptions(Checked):
    """What to compile."""

    targets: tuple[str, ...] = tuple(TARGETS)
    """Out of a100, h100, b200."""
    operations: tuple[str, ...] = OPERATIONS
    """Out of local, compress, compress_blocks (a block of one window reads two), propagate, selected (16 blocks of 64
    keys for each token, 4 query heads to a key head), squared_relu (of gated attention units: one head, a bias), and
    the recurrences: sum (with the sum of the weights), sum_decay, sum_feature_decay, delta, delta_decay,
    delta_feature_decay."""
    mechanisms: tuple[str, ...] = gpu_mechanisms.NAMES
    """Out of linear, norm, cosformer, performer, deltanet, gau, flash, bsbr, diag, brl-encoder, brl-decoder."""
    training: tuple[str, ...] = NETWORKS
    """Out of full, local, brl, gated_deltanet, mamba2."""
    length: Length = 16384
    """Tokens of the operations; every program is compiled for twice the tokens too."""
    heads: Width = 8
    """Heads of query, key and value."""
    head_dim: Width = 128
    """Features of a head."""
    window: Count = 256
    """Keys that a query of local attention sees."""
    compressed: Count = 128
    """Compressed tokens of compress and propagate, and of a block."""

    def __post_init__(self) -> None:
        names = {"mechanisms": gpu_mechanisms.NAMES, "training": NETWORKS}
        check_names(self, targets=TARGETS, operations=OPERATIONS, **names)


def programs(options: CostOptions, length: int) -> Iterator[tuple[str, str, Callable, tuple]]:
    """(operation, pass, function, arguments) of each program for sequences of this length."""
    from pallas_kernels import triton

    many = jax.ShapeDtypeStruct((1, length, options.heads, options.head_dim), jnp.bfloat16)
    few = jax.ShapeDtypeStruct((1, options.compressed, options.heads, options.head_dim), jnp.bfloat16)
    head = jax.ShapeDtypeStruct((options.heads,), jnp.float32)
    w, rest = options.window, many.shape[2:]
    past = jax.ShapeDtypeStruct((1, length + w, *rest), jnp.bfloat16)
    blocks = jax.ShapeDtypeStruct((1, length // w, options.compressed, *rest), jnp.bfloat16)
    # The features of a bias follow the features of queries and keys.
    wide, one = (jax.ShapeDtypeStruct((1, length, 1, n * options.head_dim), jnp.bfloat16) for n in (2, 1))
    token = jax.ShapeDtypeStruct((1, length), jnp.int32)
    kv_heads = options.heads // (4 if options.heads % 4 == 0 else 1)
    shared = jax.ShapeDtypeStruct((1, length, kv_heads, options.head_dim), jnp.bfloat16)
    lists = jax.ShapeDtypeStruct((1, length, kv_heads, 16), jnp.int32)
    window = SlidingWindow.of_width(options.window, True)
    rectangles = tuple((i, i + 128, i - window.left, i + 128) for i in range(0, length, 128))
    pattern = triton.Pattern(rectangles, window.visible, True, length, length)
    scale = options.head_dim**-0.5
    functions: dict[str, tuple[Callable, tuple]] = {
        "local": (functools.partial(triton.local_attention, pattern=pattern), (many, many, many)),
        "compress": (
            lambda q, k, c, v, g: triton.compress(q, k, c, v, gamma=g, scale=scale),
            (few, many, many, many, head),
        ),
        "compress_blocks": (
            lambda q, k, c, v, g: triton.compress_blocks(
                q, k, c, v, gamma=g, scale=scale, block_size=w, history_size=2 * w
            )[0],
            (blocks, past, past, past, head),
        ),
        "propagate": (
            lambda q, k, v, s: triton.propagate(q, k, v, strength=s, scale=scale),
            (many, few, few, head),
        ),
        "selected": (
            functools.partial(triton.selected_attention, size=64, scale=scale),
            (many, shared, shared, lists, token),
        ),
        "squared_relu": (
            lambda q, k, v, *ranges: triton.squared_relu_attention(q, k, v, triton.Ranges(*ranges)),
            (wide, wide, one, token, token, token, token),
        ),
    }
    state = jax.ShapeDtypeStruct((1, options.heads, options.head_dim, options.head_dim), jnp.float32)
    number = jax.ShapeDtypeStruct((1, length, options.heads), jnp.float32)
    sums = jax.ShapeDtypeStruct(state.shape[:3], jnp.float32)
    for name, extra in RECURRENCES.items():
        log = jax.ShapeDtypeStruct(many.shape, jnp.float32) if "feature" in name else number
        shapes_of = {"key_sum": sums, "log_decay": log}
        numbers = [shapes_of.get(each, number) for each in extra]
        functions[name] = (functools.partial(recur, extra), (many, many, many, state, *numbers))
    for name in options.operations:
        for passes, function, arguments in each_pass(*functions[name]):
            yield name, passes, function, arguments


#: The operands of a recurrence beyond query, key, value and the state of their outer products.
RECURRENCES = {
    "sum": ("key_sum",),
    "sum_decay": ("log_decay",),
    "sum_feature_decay": ("log_decay",),
    "delta": ("beta",),
    "delta_decay": ("log_decay", "beta"),
    "delta_feature_decay": ("log_decay", "beta"),
}


def recur(names: tuple[str, ...], query: Any, key: Any, value: Any, state: Any, *numbers: Any) -> list[Any]:
    from pallas_kernels import triton

    operands = triton.Operands(query, key, value, state, **dict(zip(names, numbers)))
    found = triton.recurrence(operands, out_dtype=query.dtype)
    return [x for x in found if x is not None]


def each_pass(function: Callable, arguments: tuple) -> Iterator[tuple[str, Callable, tuple]]:
    """(pass, function, arguments) of a function and of the function with its gradients."""
    yield "forward", function, arguments
    yield "forward + backward", both_passes(function), (jax.eval_shape(function, *arguments), *arguments)


@dataclasses.dataclass(frozen=True)
class Kernel:
    """One of our kernels as the assembler made it."""

    name: str
    registers: int
    spilled: int
    shared: int
    error: str = ""


# Operations of a compiled program that launch nothing.
_FREE = frozenset(
    "parameter constant tuple get-tuple-element bitcast after-all opt-barrier add-dependency".split()  # noqa: SIM905
)


def launches(hlo: str) -> tuple[int, int]:
    """How many kernels a compiled program launches, and the bytes of their operands and results."""
    bodies, entry = computations(hlo)

    def walk(name: str, times: int) -> tuple[int, int]:
        count = size = 0
        shapes: dict[str, str] = {}
        for line in bodies.get(name, ()):
            found = re.match(r"\s+(?:ROOT )?%?([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\((.*)$", line)
            if found is None:
                continue
            result, shape, operation, rest = found.groups()
            shapes[result] = shape
            if operation in _FREE or operation.endswith("-done"):
                continue
            if operation in ("while", "call", "async-start"):
                called = re.search(r"(?:body|to_apply|calls)=%?([\w.-]+)", rest)
                condition = re.search(r"condition=%?([\w.-]+)", rest)
                often = trips(line, bodies.get(condition[1], ())) if condition else 1
                inner = walk(called[1], times * often) if called else (0, 0)
                count, size = count + inner[0], size + inner[1]
                continue
            operands = re.findall(r"%([\w.-]+)", rest.split("), ")[0])
            moved = array_bytes(shape) + sum(array_bytes(shapes.get(o, "")) for o in dict.fromkeys(operands))
            count, size = count + times, size + times * moved
        return count, size

    return walk(entry, 1)


def assembler() -> str:
    """The assembler of GPU kernels. Raises UserError if it is missing."""
    found = find_assembler()
    if found is None:
        raise UserError("ptxas is missing: pip install -e '.[gpu]'")
    return found


def assemble(ptx: Path, architecture: str) -> Kernel:
    """A kernel's registers, spills and shared memory on an architecture."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as out:
        line = [assembler(), "-v", f"-arch={architecture}", "-o", out.name, str(ptx)]
        done = subprocess.run(line, capture_output=True, text=True)
    log = done.stderr + done.stdout
    entry = re.search(r"\.entry (\w+)", ptx.read_text(errors="replace"))
    name = entry[1] if entry else ptx.stem
    if done.returncode:
        return Kernel(name, 0, 0, 0, f"the assembler refused it: {' '.join(log.split())[-200:]}")

    def number(pattern: str) -> int:
        found = re.search(pattern, log)
        return int(found[1]) if found else 0

    spilled = number(r"(\d+) bytes spill stores") + number(r"(\d+) bytes spill loads")
    info = ptx.with_suffix(".compile_info")
    dynamic = int(info.read_text().rsplit(":", 1)[1]) if info.exists() else 0
    registers = number(r"Used (\d+) registers")
    # If tensor memory is too small, Triton writes a kernel of a few instructions that stops the program.
    trap = "Triton made a trap of it: too much tensor memory" if registers <= 8 else ""
    return Kernel(name, registers, spilled, number(r"(\d+) bytes smem") + dynamic, trap)


def _compile(function: Callable, arguments: tuple, name: str) -> Any:
    return _lower(function, arguments, name).compile()


def _lower(function: Callable, arguments: tuple, name: str) -> Any:
    description = TARGETS[name].description(name)
    topology = topologies.get_topology_desc(
        platform="cuda", topology_name=name, topology="1x1x1", target_config=description
    )
    where = jax.sharding.SingleDeviceSharding(topology.devices[0])
    shaped = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), arguments)
    return jax.jit(function).lower(*shaped)


def measure(options: CostOptions, target: str, dump: Path) -> Iterator[tuple[list[str], list[str]]]:
    """A row of the first table for each operation and pass, and its problems. Triton's bridge leaves its code in
    `dump`."""
    both = zip(programs(options, options.length), programs(options, 2 * options.length), strict=True)
    for (operation, passes, function, arguments), (*_, longer, doubled) in both:
        before = set(dump.rglob("*.ptx"))
        compiled = _compile(function, arguments, target)
        own = sorted(set(dump.rglob("*.ptx")) - before)
        kernels = [assemble(path, TARGETS[target].architecture) for path in own]
        count, moved = launches(compiled.as_text())
        twice, _ = launches(_compile(longer, doubled, target).as_text())
        memory = compiled.memory_analysis()
        traffic = moved / max(memory.argument_size_in_bytes + memory.output_size_in_bytes, 1)
        temporary = memory.temp_size_in_bytes / 2**20
        words = "; ".join(
            f"{k.name} {k.registers} registers, {k.spilled} B spilled, {k.shared / 1024:.0f} KiB shared"
            for k in kernels
        )
        cells = [target, operation, passes, str(count), f"{traffic:.2f}", f"{temporary:.1f}", words]
        found = [f"{k.name} spills {k.spilled} bytes" for k in kernels if k.spilled]
        found += [f"{k.name}: {k.error}" for k in kernels if k.error]
        # XLA reduces the longer transposed lists of `selected` in more steps; a loop over them would be twice as long.
        if twice > count * (gpu_mechanisms.GROWTH if operation == "selected" else 1):
            found.append(f"{count} launches grow to {twice} at twice the tokens")
        forward, backward, least = MOST[operation]
        most = forward if passes == "forward" else backward
        if count > most:
            found.append(f"{count} launches, more than {most}")
        if passes == "forward" and traffic > least:
            found.append(f"{traffic:.2f} times the least bytes, more than {least}")
        room = TEMPORARY[passes] * options.length * options.heads * options.head_dim / 2**20
        if operation in RECURRENCES and temporary > room:
            found.append(f"{temporary:.1f} MiB of temporary memory, more than {room:.1f}")
        yield cells, [f"{target}: {operation}, {passes}: {problem}" for problem in found]


def measure_mechanisms(options: CostOptions, target: str) -> Iterator[tuple[list[str], list[str]]]:
    """A row of the second table for each mechanism and pass, and its problems."""
    short, long = gpu_mechanisms.LENGTHS
    for name in options.mechanisms:
        programs = (
            each_pass(*gpu_mechanisms.program(name, length, options.heads, options.head_dim))
            for length in (short, long)
        )
        for both in zip(*programs):
            passes = both[0][0]
            compiled = [_compile(function, arguments, target) for _, function, arguments in both]
            few, many = (launches(each.as_text())[0] for each in compiled)
            less, more = (each.memory_analysis().temp_size_in_bytes for each in compiled)
            found, most = [], gpu_mechanisms.MOST[passes]
            if many > most:
                found.append(f"{many} launches for {long} tokens, more than {most}")
            if many > gpu_mechanisms.GROWTH * few:
                found.append(f"{few} launches for {short} tokens grow to {many} for {long}")
            if more > 1.1 * long / short * less:
                found.append(f"{less} bytes of temporary memory for {short} tokens grow to {more} for {long}")
            cells = [str(few), str(many), f"{less / 2**20:.0f}", f"{more / 2**20:.0f}"]
            where = f"{target}: {name}, {passes}"
            yield [target, name, passes, *cells], [f"{where}: {problem}" for problem in found]


def network_gradient(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """The loss of a two-layer decoder with its gradient, as a function of parameters and tokens, and their shapes."""
    size: dict[str, Any] = {"num_layers": 2, "d_model": 128, "num_heads": 4, "vocab_size": 256}
    model = DecoderLM(DecoderConfig(**size, mechanism=MECHANISMS[name](), dtype="bfloat16"))
    tokens = jax.ShapeDtypeStruct((8, 512), jnp.int32)
    parameters = jax.eval_shape(model.init, jax.random.key(0), tokens)

    def loss(parameters: Any, tokens: Any) -> Any:
        outputs: Any = model.apply(parameters, tokens, tokens, method="loss")
        total, weight, _ = outputs
        return total / weight

    return jax.value_and_grad(loss), (parameters, tokens)


def tuned_products(hlo: str) -> int:
    """Matrix products of a compiled program that XLA tunes: library calls, and kernels that it generates itself."""
    return len(re.findall(r'custom_call_target="__cublas|"kind":"__triton_(?:nested_)?gemm', hlo))


def _processor_seconds() -> float:
    """Of this process and of those that it started and that have ended, such as the assembler."""
    return sum(os.times()[:4])


def measure_training(options: CostOptions, target: str) -> Iterator[tuple[list[str], list[str]]]:
    """A row of the third table for each network, and its problems."""
    first = None
    for name in options.training:
        function, arguments = network_gradient(name)
        start = _processor_seconds()
        lowered = _lower(function, arguments, target)
        middle = _processor_seconds()
        products = tuned_products(lowered.compile().as_text())
        numbers = (middle - start, _processor_seconds() - middle)
        first = first or products
        most = MOST_PRODUCTS * first
        found = f"{target}: {name}: {products} tuned products, more than {most:.0f}"
        cells = [target, name, str(products), *(f"{number:.1f}" for number in (products / first, *numbers))]
        yield cells, [found] if products > most else []


@command(CostOptions(), "eval.gpu_costs", "Compiles the GPU kernels and prints their costs.")
def main(options: CostOptions) -> None:
    for name in ("triton", "jax_triton", "jax_plugins"):
        if importlib.util.find_spec(name) is None:
            raise UserError(f"{name} is missing: pip install -e '.[gpu]'")
    jax.config.update("jax_platforms", "cpu")  # the plugin compiles without looking for a driver
    os.environ["PATH"] = f"{Path(assembler()).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    # Without a device, XLA's autotuner of fusions compiles each of them once more and has nothing to time.
    switch_off("xla_gpu_experimental_enable_fusion_autotuner")
    short, long = (f"{length} tokens" for length in gpu_mechanisms.LENGTHS)
    columns = (f"launches, {short}", f"launches, {long}", f"temporary MiB, {short}", f"temporary MiB, {long}")
    seconds = ("to trace and lower, s", "to compile, s")
    problems: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_TRITON_DUMP_DIR"] = folder
        for table, rows in (
            (
                Table(
                    "target", "operation", "pass", "launches", "bytes / least", "temporary MiB", "our kernels"
                ),
                functools.partial(measure, dump=Path(folder)),
            ),
            (Table("target", "mechanism", "pass", *columns, title="all chunks at once"), measure_mechanisms),
            (
                Table(
                    "target",
                    "network",
                    "tuned products",
                    "of the first row",
                    *seconds,
                    title="a training step",
                ),
                measure_training,
            ),
        ):
            for target in options.targets:
                os.environ["BRL_JAX_GPU_CAPABILITY"] = str(TARGETS[target].capability)
                jax.clear_caches()  # what was traced for another target has made its choices
                for row, found in rows(options, target):
                    print(", ".join(row[:3]), file=sys.stderr, flush=True)
                    table.add(*row)
                    problems += found
            table.show()
    if problems:
        raise RunError("; ".join(problems))
