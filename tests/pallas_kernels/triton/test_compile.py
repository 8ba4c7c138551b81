"""Each GPU kernel compiled for an A100, an H100 and a B200 by Triton alone: no GPU, no driver, no CUDA plugin."""

import functools
import importlib.util
import os

import jax
import jax.numpy as jnp
import pytest

from brl_jax.attention.local.patterns import SlidingWindow
from eval.chips.gpu_costs import RECURRENCES, TARGETS, CostOptions, assemble, programs, recur
from eval.harness.passes import both_passes
from pallas_kernels import triton
from pallas_kernels.triton.core import bridge
from tests.pallas_kernels.triton.transposed_products import transposed_products

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("triton") is None or bool(os.environ.get("TRITON_INTERPRET")),
        reason="triton is not installed (pip install '.[gpu-test]'), or it interprets",
    ),
    pytest.mark.slow,
    pytest.mark.xdist_group("triton"),
]
TYPES = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32", "int8": "*i8"}


def half(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


def local(query, key, value, sinks, ids):
    window = SlidingWindow.of_width(256, True)
    length = query.shape[1]
    rectangles = tuple((i, i + 128, i - window.left, i + 128) for i in range(0, length, 128))
    return triton.local_attention(
        query, key, value, pattern=triton.Pattern(rectangles, window.visible, True, length, length),
        logits_soft_cap=50.0, sinks=sinks, query_segment_ids=ids, key_segment_ids=ids,
    )  # fmt: skip


WIDE = half(1, 1024, 8, 128)
KEY = half(1, 1024, 4, 128)
STATE = jax.ShapeDtypeStruct((1, 4, 128, 128), jnp.float32)
NUMBER = jax.ShapeDtypeStruct((1, 1024, 4), jnp.float32)
TOKEN = jax.ShapeDtypeStruct((1, 1024), jnp.int32)


def recurrence(name):
    """The recurrence of grouped heads and segments."""
    names = (*RECURRENCES[name], "segments")
    shapes = {"segments": TOKEN, "key_sum": jax.ShapeDtypeStruct((1, 4, 128), jnp.float32)}
    if "feature" in name:
        shapes["log_decay"] = jax.ShapeDtypeStruct(KEY.shape, jnp.float32)
    more = [shapes.get(each, NUMBER) for each in names]
    return functools.partial(recur, names), (WIDE, KEY, KEY, STATE, *more)


#: What differs from the operations of `eval.gpu_costs`: sinks, a cap, segments, grouped heads.
OWN = {
    "local": (local, (WIDE, WIDE, WIDE, jax.ShapeDtypeStruct((8,), jnp.float32), TOKEN)),
    **{name: recurrence(name) for name in RECURRENCES},
}
OPERATIONS = (
    *OWN, "compress", "compress-wide", "compress_blocks", "compress_blocks-wide", "propagate", "selected-wide",
    "squared_relu-wide",
)  # fmt: skip


def forward(operation):
    """The function and the shapes of its arguments; "-wide" has 128 features and compressed tokens instead of 64."""
    if operation in OWN:
        return OWN[operation]
    name, _, wide = operation.partition("-")
    size = 128 if wide else 64
    options = CostOptions(operations=(name,), head_dim=size, compressed=size, window=128)
    _, _, function, shapes = next(programs(options, 1024))
    return function, shapes


def launches(jaxpr):
    """(shapes of the operands, parameters) of every launch in a program."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "gpu_kernel_launch":
            yield [x.aval for x in equation.invars], equation.params
        for value in equation.params.values():
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from launches(inner)


def compiled(arrays, launch, capability):
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    function = triton.jit(launch["kernel"])
    pointers = [TYPES[x.dtype.name] for x in (*arrays, *launch["results"])]
    constants = dict(launch["constants"])
    names = function.arg_names
    signature = dict(zip(names, pointers)) | dict.fromkeys(names[len(pointers) :], "constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i in range(len(pointers))}
    options = {name: launch[name] for name in ("num_warps", "num_stages")}
    source = ASTSource(function, signature, constants, aligned)
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def launches_of(operation):
    """The launches of an operation and its backward pass."""
    function, shapes = forward(operation)
    jax.clear_caches()  # or another GPU's launches would be found
    cotangent = jax.eval_shape(function, *shapes)
    return [*launches(jax.make_jaxpr(both_passes(function))(cotangent, *shapes).jaxpr)]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_compiles_without_spills(operation, target, monkeypatch, tmp_path):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns otherwise
    monkeypatch.setenv("BRL_JAX_GPU_CAPABILITY", str(TARGETS[target].capability))
    monkeypatch.setattr(bridge, "_PACKAGES", ("triton",))
    found = launches_of(operation)
    # On an A100, the backward pass of a wide compress has two kernels.
    wide = 3 if target == "a100" else 2
    expected = {
        "local": 3,
        "compress": 2,
        "compress-wide": wide,
        "compress_blocks": 3,
        "compress_blocks-wide": 3,
        "propagate": 3,
        "selected-wide": 4,
        "squared_relu-wide": 4,
        "sum": 7,
        "sum_decay": 8,
        "sum_feature_decay": 7,
        "delta": 7,
        "delta_decay": 7,
        "delta_feature_decay": 7,
    }
    assert len(found) == expected[operation]
    for number, (arrays, launch) in enumerate(found):
        path = tmp_path / f"{number}.ptx"
        code = compiled(arrays, launch, TARGETS[target].capability).asm
        # The gradient of compress was right on an H100 and an H200 with what `bridge.LEAST_TRITON` lets through.
        assert operation in ("compress", "compress-wide") or not transposed_products(code["ttir"])
        path.write_text(code["ptx"])
        kernel = assemble(path, TARGETS[target].architecture)
        assert not kernel.error, kernel
        assert kernel.spilled == 0, kernel


@pytest.mark.parametrize("capability", [86, 120])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_gpus_with_99_kib_of_shared_memory(operation, capability, monkeypatch):
    """GeForce and workstation GPUs give a block less of it than an A100, H100 or B200."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    monkeypatch.setenv("BRL_JAX_GPU_CAPABILITY", str(capability))
    monkeypatch.setattr(bridge, "_PACKAGES", ("triton",))
    for arrays, launch in launches_of(operation):
        assert compiled(arrays, launch, capability).metadata.shared <= 99 * 1024


def test_an_a100_compresses_wide_tokens_in_half_precision_alone(monkeypatch):
    monkeypatch.setenv("BRL_JAX_GPU_CAPABILITY", "80")
    monkeypatch.setattr(bridge, "_PACKAGES", ("triton",))
    few, many = half(1, 128, 8, 64), half(1, 1024, 8, 64)
    assert triton.compress_unsupported(few, many) is None
    few, many = (jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (few, many))
    assert "float32 supports at most 64 compressed tokens" in triton.compress_unsupported(few, many)
