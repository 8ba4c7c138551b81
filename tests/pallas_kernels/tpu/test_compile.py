"""Compiles the kernels for real TPU chips on this host, if libtpu is installed (extra `tpu`)."""

import functools
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.core.biases import ALiBi, RotaryBias, T5Bias, alibi_slopes
from brl_jax.attention.core.by_platform import platform_jaxpr
from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.local.api import local_attention
from brl_jax.attention.local.far_patterns import BigBird, BlockMask, Fixed, GlobalWindow, Strided
from brl_jax.attention.local.patterns import BlockDiagonal, Bucketed, Dilated, SlidingWindow
from eval.chips.tpu_chips import described_devices, prepare_compiler
from pallas_kernels.tpu import (
    DistanceTable,
    Factors,
    Slopes,
    block_attention,
    compress,
    compress_blocks,
    propagate,
    recurrence,
    window_attention,
)
from pallas_kernels.tpu.block import plan
from tests.marks import slow_unless

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed (pip install -e '.[tpu]')"
    ),
    pytest.mark.usefixtures("uncached"),
]


@functools.cache
def devices(chip):
    prepare_compiler()
    return described_devices(chip)


def compile_both(chip, f, shapes, dtype=jnp.bfloat16, gradients=True):
    """Compiles forward and backward of f, whose arguments arrive as projections produce them: with concatenated
    heads."""
    sharding = jax.sharding.SingleDeviceSharding(devices(chip)[0])
    flat = [jax.ShapeDtypeStruct((*s[:2], s[2] * s[3]), dtype, sharding=sharding) for s in shapes]

    def run(arrays):
        out, pull = jax.vjp(f, *(x.reshape(s) for x, s in zip(arrays, shapes)))
        return [x.reshape(*x.shape[:2], -1) for x in (out, *pull(out))]

    return jax.jit(run).lower(flat).compile()


def attend(chip, n, heads, groups, head_dim, f, dtype=jnp.bfloat16):
    q, k = (1, n, heads, head_dim), (1, n, groups, head_dim)
    return compile_both(chip, f, (q, k, k), dtype)


@pytest.mark.parametrize(
    ("chip", "n", "heads", "groups", "head_dim", "left", "right", "dtype"),
    [
        ("v4", 1 << 14, 8, 8, 128, 511, 0, jnp.bfloat16),
        ("v5e", 1 << 14, 8, 8, 64, 255, 0, jnp.bfloat16),
        ("v5e", 1000, 2, 1, 128, 63, 0, jnp.float32),
        ("v5p", 1 << 14, 8, 2, 128, 127, 0, jnp.bfloat16),
        ("v6e", 1 << 18, 8, 8, 128, 511, 0, jnp.bfloat16),
        ("7x", 1 << 10, 8, 8, 128, 255, 0, jnp.bfloat16),
        # These need more memory than every kernel gets by default.
        pytest.param("v5e", 1 << 12, 2, 2, 64, 1023, 0, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("v6e", 1 << 12, 2, 2, 64, 1023, 0, jnp.bfloat16, marks=pytest.mark.slow),
        pytest.param("7x", 1 << 12, 1, 1, 256, 1023, 0, jnp.bfloat16, marks=pytest.mark.slow),
        # float32 takes several times the memory of bfloat16.
        ("v5e", 1 << 12, 8, 8, 16, 256, 256, jnp.float32),
        ("v5e", 1 << 12, 8, 8, 16, 512, 512, jnp.float32),
        ("v5e", 1 << 12, 8, 8, 64, 128, 127, jnp.float32),
        ("v5e", 1 << 12, 2, 2, 256, 255, 0, jnp.float32),
        ("7x", 1 << 12, 8, 8, 64, 256, 256, jnp.float32),
        ("v5p", 1 << 12, 8, 8, 16, 255, 0, jnp.float32),
        ("v6e", 1 << 12, 8, 8, 16, 256, 256, jnp.float32),
        ("v4", 1 << 12, 4, 4, 128, 255, 0, jnp.float32),
    ],
)
def test_window_attention(chip, n, heads, groups, head_dim, left, right, dtype):
    f = functools.partial(window_attention, left=left, right=right, chip=chip)
    attend(chip, n, heads, groups, head_dim, f, dtype)


def test_a_window_of_float32_that_fits_no_chip_goes_by_blocks():
    f = functools.partial(local_attention, local_window_size=256, implementation="pallas")
    text = attend("v4", 4096, 8, 8, 16, f, jnp.float32).as_text()
    assert "block_attention_forward" in text


def windows(width):
    """Local attention with a bias: by windows, or by lists of blocks if a window is too wide."""

    def f(query, key, value, table):
        bias = T5Bias(table[0, :, 0])
        return local_attention(query, key, value, bias, local_window_size=(width - 1, 0), is_causal=True)

    return f


#: Each with its heads, their width, more arrays' shapes and the most bytes that 2**17 tokens may take.
MEMORY = {
    "windows": (functools.partial(window_attention, left=255, right=0), 8, 128, (), None),
    "windows with a bias": (windows(256), 2, 128, ((1, 32, 1, 2),), 1 << 25),
    "wide windows with a bias": (windows(4096), 2, 128, ((1, 32, 1, 2),), 1 << 25),
    "full": (functools.partial(full_attention, is_causal=True), 2, 64, (), (1 << 17) ** 2 / 16),
}


@pytest.mark.parametrize("name", slow_unless(MEMORY, ("windows",)))
def test_temporary_memory_is_linear(name):
    f, heads, head_dim, more, most = MEMORY[name]
    small, large = (
        compile_both("v5e", f, (*((1, n, heads, head_dim),) * 3, *more)).memory_analysis().temp_size_in_bytes
        for n in (1 << 14, 1 << 17)
    )
    statistics = 2 * heads * 4 * (1 << 14)
    assert small <= 8 * statistics or name != "windows"
    assert large <= 8 * 1.1 * (small if name == "full" else max(small, statistics))
    assert most is None or large < most


@pytest.mark.parametrize(
    ("chip", "head_dim", "tokens", "dtype"),
    [
        ("v5e", 128, 128, jnp.bfloat16),
        ("7x", 64, 256, jnp.bfloat16),
        # Narrow heads, as in a preset of the Long Range Arena.
        ("v5e", 8, 256, jnp.float32),
        ("v5e", 8, 512, jnp.float32),
        ("v5e", 4, 384, jnp.bfloat16),
    ],
)
def test_compress_and_propagate(chip, head_dim, tokens, dtype):
    short, long = (1, tokens, 8, head_dim), (1, 4096, 8, head_dim)
    ones = jnp.ones((8,), jnp.float32)
    compile_both(chip, functools.partial(compress, gamma=ones, chip=chip), (short, long, long, long), dtype)
    compile_both(chip, functools.partial(propagate, strength=ones, chip=chip), (long, short, short), dtype)


def test_scores_and_blockwise_history():
    """The Laplace score and per-block history bounds lower for a TPU."""
    ones = jnp.ones((2,), jnp.float32)

    def f(query, key, contrast, value):
        blocks = query.reshape(1, 4, -1, 2, 128)
        lengths = jnp.asarray([[0, 256, 512, 512]], jnp.int32)
        sizes = {"block_size": 256, "history_size": 512, "history_lengths": lengths}
        out = compress_blocks(blocks, key, contrast, value, gamma=ones, score="laplace", chip="v5e", **sizes)
        return out.reshape(query.shape)

    long = (1, 1280, 2, 128)
    compile_both("v5e", f, ((1, 4 * 32, 2, 128), long, long, long))


def test_block_attention():
    rows = [[0, *range(max(1, i - 1), i + 1)] for i in range(8)]

    def strided(queries, keys):
        return (keys <= queries) & (jax.lax.rem(queries - keys, 4) == 0)

    f = functools.partial(
        block_attention, key_blocks=rows, block_q=256, block_k=256, mask=strided, chip="v6e"
    )
    attend("v6e", 2000, 4, 2, 64, f)


def biased(kind, heads):
    """A bias, and the numbers that define it."""
    if kind == "alibi":
        return ALiBi, (alibi_slopes(heads),)
    if kind == "rotary":
        return RotaryBias, (jnp.ones((heads, 32)), jnp.ones((heads, 32)))
    return functools.partial(T5Bias, max_distance=128, bidirectional=True), (jnp.ones((32, heads)),)


@pytest.mark.parametrize(
    ("chip", "heads", "groups", "head_dim", "window", "kind", "dtype"),
    slow_unless(
        [
            ("v5e", 4, 2, 64, 64, "t5", jnp.bfloat16),
            ("v6e", 2, 2, 128, None, "alibi", jnp.bfloat16),
            ("v5e", 2, 2, 256, 2048, "alibi", jnp.bfloat16),
            ("v6e", 2, 1, 64, 2048, "t5", jnp.float32),
            ("v6e", 2, 2, 256, None, "t5", jnp.bfloat16),
            ("7x", 2, 2, 128, 100, "rotary", jnp.bfloat16),
            ("7x", 3, 1, 64, None, "t5", jnp.bfloat16),
            ("7x", 2, 2, 256, 512, "alibi", jnp.float32),
            ("v4", 4, 4, 32, None, "t5", jnp.float32),
            ("v5p", 2, 2, 128, 4096, "rotary", jnp.bfloat16),
        ],
        (("v5e", 4, 2, 64, 64, "t5", jnp.bfloat16), ("v6e", 2, 2, 128, None, "alibi", jnp.bfloat16)),
    ),
)
def test_biases_by_distance(chip, heads, groups, head_dim, window, kind, dtype):
    """Causal windows and full attention, with the gradient of the bias."""
    make, numbers = biased(kind, heads)
    window_size = {} if window is None else {"local_window_size": (window - 1, 0)}

    def f(query, key, value):
        # Numbers that depend on the arrays, so that their gradients are compiled as well.
        bias = make(*(x * query[0, 0, 0, 0].astype(jnp.float32) for x in numbers))
        function = full_attention if window is None else local_attention
        return function(query, key, value, bias, is_causal=True, **window_size)

    text = attend(chip, 2000, heads, groups, head_dim, f, dtype).as_text()
    kernel = "window_attention" if window in (64, 100) else "block_attention"
    assert f"{kernel}_forward" in text
    assert f"{kernel}_backward" in text


@pytest.mark.parametrize(
    ("chip", "heads", "groups", "head_dim", "left", "right", "dtype"),
    slow_unless(
        [
            ("v5e", 8, 8, 128, 255, 0, jnp.bfloat16),
            ("v6e", 8, 1, 128, 511, 0, jnp.bfloat16),
            ("v4", 8, 8, 64, 255, 0, jnp.bfloat16),
            ("v5p", 4, 2, 64, 100, 100, jnp.bfloat16),
            ("7x", 2, 1, 256, 255, 0, jnp.bfloat16),
            ("v5e", 2, 2, 64, 1023, 0, jnp.bfloat16),
            ("v6e", 8, 8, 128, 1023, 0, jnp.bfloat16),
            ("v6e", 4, 4, 64, 256, 256, jnp.float32),
            ("v5e", 8, 2, 64, 128, 127, jnp.float32),
            ("v4", 4, 4, 128, 127, 0, jnp.float32),
        ],
        (("v5e", 8, 8, 128, 255, 0, jnp.bfloat16), ("v6e", 8, 1, 128, 511, 0, jnp.bfloat16)),
    ),
)
@pytest.mark.parametrize("kind", ["slopes", "table"])
def test_windows_with_biases(chip, heads, groups, head_dim, left, right, dtype, kind):
    """The window kernel with a bias, and the memory that it requests."""

    def f(query, key, value):
        number = query[0, 0, 0, 0].astype(jnp.float32)
        bias = Slopes(jnp.full(heads, number))
        if kind == "table":
            bias = DistanceTable(jnp.full((heads, 129), number), -64)
        return window_attention(query, key, value, left=left, right=right, bias=bias, chip=chip)

    attend(chip, 4096, heads, groups, head_dim, f, dtype)


@pytest.mark.parametrize(
    ("chip", "head_dim", "tokens", "dtype"),
    slow_unless(
        [("v5e", 64, 64, jnp.bfloat16), ("v6e", 128, 256, jnp.float32), ("7x", 256, 128, jnp.bfloat16)],
        (("v5e", 64, 64, jnp.bfloat16),),
    ),
)
def test_compress_and_propagate_with_biases_and_masks(chip, head_dim, tokens, dtype):
    ones, heads = jnp.ones((4,), jnp.float32), 4
    short, long = (1, tokens, heads, head_dim), (1, 2000, heads, head_dim)

    def numbers(array, *shape):
        return jnp.broadcast_to(array[0, 0, 0, 0].astype(jnp.float32), (1, *shape))

    def compressed(query, key, contrast, value):
        bias, mask = numbers(query, heads, tokens, 2000), key[:, None, None, :, 0, 0] > 0
        return compress(query, key, contrast, value, gamma=ones, bias=bias, mask=mask, chip=chip)

    def masked(query, key, contrast, value):
        return compress(
            query, key, contrast, value, gamma=ones, mask=key[:, None, None, :, 0, 0] > 0, chip=chip
        )

    def of_blocks(query, key, contrast, value):
        blocks, sizes = query.reshape(1, 2, -1, heads, head_dim), {"block_size": 160, "history_size": 500}
        bias = numbers(query, heads, tokens // 2, 500)[0]
        out = compress_blocks(blocks, key, contrast, value, gamma=ones, bias=bias, chip=chip, **sizes)
        return out.reshape(query.shape)

    def propagated(query, key, value):
        bias = numbers(query, heads, 2000, tokens)
        return propagate(query, key, value, strength=ones, bias=bias, chip=chip)

    for f in (compressed, masked, of_blocks):
        compile_both(chip, f, (short, long, long, long), dtype)
    compile_both(chip, propagated, (long, short, short), dtype)


PATTERNS = {
    "dilated": Dilated(63, 0, 3),
    "block diagonal": BlockDiagonal(64),
    "bucketed": Bucketed(100),
    "strided": Strided(48),
    "fixed": Fixed(64, 4),
    "window too wide for its kernel": SlidingWindow(1 << 13, 0),
    "global window": GlobalWindow(100, 100, 60),
    "big bird": BigBird(64),
    "block mask": BlockMask.of(40, np.eye(100, dtype=bool)),
}


@pytest.mark.parametrize("name", PATTERNS)
def test_patterns(name):
    """Each pattern of local attention through `local_attention`, at an uneven length."""
    pattern = PATTERNS[name]
    f = functools.partial(local_attention, pattern=pattern, is_causal=pattern.causal_ok)
    compiled = attend("7x" if pattern.causal_ok else "v5e", 4000, 2, 2, 64, f)
    assert "tpu_custom_call" in compiled.as_text()


def test_prefill_behind_a_cache():
    """A chunk of queries; its first key's position is known only at run time."""

    def f(query, key, value):
        at = jnp.int32(query[0, 0, 0, 0])
        pattern = Bucketed(128)
        return local_attention(
            query, key, value, pattern=pattern, is_causal=True, query_offset=255, key_offset=at
        )

    shapes = ((1, 512, 2, 128), *((1, 767, 2, 128),) * 2)
    assert "tpu_custom_call" in compile_both("v6e", f, shapes).as_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("chip", "tokens", "heads", "groups", "head_dim", "dtype", "kernels"),
    [
        ("v5e", 4096, 8, 2, 64, jnp.bfloat16, "all"),
        ("v4", 4096, 2, 2, 256, jnp.float32, "key"),
        ("v4", 16384, 1, 1, 128, jnp.bfloat16, "all"),
        ("v6e", 4096, 8, 8, 128, jnp.bfloat16, "all"),
        ("7x", 131072, 1, 1, 128, jnp.bfloat16, "key"),
    ],
)
def test_full_attention(chip, tokens, heads, groups, head_dim, dtype, kernels):
    """Causal, at an offset known only at run time; with one backward kernel where the queries' gradient fits in
    VMEM."""

    def f(query, key, value):
        offset = (query[0, 0, 0, 0] > 0).astype(jnp.int32)
        return full_attention(query, key, value, is_causal=True, query_offset=offset)

    text = attend(chip, tokens, heads, groups, head_dim, f, dtype).as_text()
    assert "block_attention_forward" in text
    assert set(re.findall(r"block_attention_backward_(all|key)", text)) == {kernels}


def test_lists_longer_than_scalar_memory(monkeypatch):
    """Splits calls into launches, each of which computes some of the blocks."""
    monkeypatch.setattr(plan, "MAX_PAIRS", 50)
    f = functools.partial(local_attention, pattern=Strided(16))
    attend("v5e", 4096, 2, 2, 64, f)


def mesh_of(chip):
    return jax.sharding.Mesh(np.asarray(devices(chip)), ("data",))


def test_sizes_follow_the_chips_that_hold_the_arrays():
    """Also through `local_attention`; without a mesh, the sizes fit every chip."""

    def grid(sharding):
        x = jax.ShapeDtypeStruct((4, 1 << 14, 2, 128), jnp.bfloat16, sharding=sharding)
        f = functools.partial(local_attention, local_window_size=(511, 0))
        (call,) = jax.jit(f).trace(x, x, x).jaxpr.eqns
        (equation,) = call.params["jaxpr"].eqns
        return re.findall(r"grid=\((\d+(?:, \d+)*)\)", str(platform_jaxpr(equation, "tpu")))

    assert grid(None) == ["4, 2, 8, 1"]
    for chip, want in (("v5e", "4, 2, 8, 1"), ("v6e", "4, 2, 4, 1")):
        mesh = mesh_of(chip)
        assert grid(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))) == [want]
        with jax.set_mesh(mesh):
            assert grid(None) == [want]


def test_shard_map():
    """Each kernel inside shard_map, with the check of mesh axes."""
    mesh = mesh_of("v5e")
    spec = jax.sharding.PartitionSpec("data")
    ones = jnp.ones((2,), jnp.float32)
    long, short = (
        jax.ShapeDtypeStruct((4, n, 2, 128), jnp.bfloat16, sharding=jax.sharding.NamedSharding(mesh, spec))
        for n in (512, 32)
    )
    rows = [[0], [0, 1]]
    for f, shapes in (
        (functools.partial(window_attention, left=99, right=0), (long, long, long)),
        (functools.partial(window_attention, left=99, right=0, bias=Slopes(ones)), (long, long, long)),
        (functools.partial(propagate, strength=ones), (long, short, short)),
        (functools.partial(compress, gamma=ones), (short, long, long, long)),
        (functools.partial(block_attention, key_blocks=rows, block_q=256, block_k=256), (long, long, long)),
    ):

        def both(*arrays, f=f):
            out, pull = jax.vjp(f, *arrays)
            return pull(out)

        jax.jit(jax.shard_map(both, mesh=mesh, in_specs=spec, out_specs=spec)).lower(*shapes).compile()


@pytest.mark.parametrize(
    ("chip", "n", "heads", "groups", "head_dim", "numbers", "dtype"),
    [
        ("v5e", 1 << 14, 8, 8, 128, (), jnp.bfloat16),
        ("v5e", 1000, 4, 2, 64, ("start", "end", "log_decay", "beta"), jnp.float32),
        ("v4", 1 << 14, 8, 8, 64, ("beta",), jnp.bfloat16),
        ("v5p", 1 << 14, 8, 1, 128, ("start", "end", "log_decay"), jnp.bfloat16),
        ("v6e", 1 << 14, 8, 8, 256, ("start", "end", "log_decay", "beta"), jnp.bfloat16),
        ("7x", 1 << 10, 8, 8, 80, ("beta",), jnp.bfloat16),
        ("v5e", 1 << 14, 8, 8, 128, ("by feature",), jnp.bfloat16),
        ("v6e", 1000, 4, 2, 64, ("by feature", "start", "end", "beta"), jnp.float32),
        ("v5e", 1 << 12, 8, 2, 64, ("by feature", "beta"), jnp.bfloat16),
        ("v4", 1 << 12, 2, 2, 128, ("by feature", "beta"), jnp.float32),
        ("7x", 1 << 12, 8, 8, 32, ("by feature", "start", "end"), jnp.bfloat16),
    ],
)
def test_recurrence(chip, n, heads, groups, head_dim, numbers, dtype):
    state = jnp.zeros((1, groups, head_dim, head_dim))

    def f(query, key, value):
        # Numbers that depend on the arrays, so that their gradients are compiled as well.
        gates = -jax.nn.sigmoid(key.astype(jnp.float32))
        given = {name: gates[..., 0] for name in numbers if name != "by feature"}
        if "by feature" in numbers:
            given["log_decay"] = gates
        segments = jnp.arange(n, dtype=jnp.int32)[None] // 300
        out = recurrence(query, key, value, state, None, Factors(**given), segments=segments, chip=chip).total
        return out.astype(query.dtype)

    attend(chip, n, heads, groups, head_dim, f, dtype)
