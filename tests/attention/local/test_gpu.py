"""Messages of `local_attention` for calls that its GPU kernel does not support; tests/pallas_kernels/triton tests
numbers."""

import importlib.machinery
import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import (
    ALiBi,
    BlockDiagonal,
    Fixed,
    RotaryBias,
    SlidingWindow,
    Strided,
    alibi_slopes,
    compress,
    compress_blocks,
    full_attention,
    gau_attention,
    local_attention,
    propagate,
)
from brl_jax.attention.core.cudnn import cudnn_unsupported
from brl_jax.attention.local import cudnn
from brl_jax.attention.local.patterns import CallArrays, PatternCall

X = np.ones((1, 16, 2, 8), np.float32)


def call(**options):
    pattern = options.pop("pattern", SlidingWindow(3, 0))
    return local_attention(X, X, X, pattern=pattern, implementation="triton", **options)


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(NotImplementedError, match=r"triton and jax_triton must be installed \(pip install"):
        call()


@pytest.fixture
def installed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: importlib.machinery.ModuleSpec(name, None))


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pattern": Strided(4)}, "pattern must touch few blocks of keys, and the columns of Strided"),
        ({"pattern": Fixed(4)}, "the columns of Fixed touch all of them"),
        ({"bias": ALiBi(alibi_slopes(2))}, "bias must be None, got ALiBi"),
    ],
)
def test_what_the_kernel_does_not_support(options, message):
    with pytest.raises(
        NotImplementedError, match=f"local_attention with implementation='triton': .*{message}"
    ):
        call(**options)


@pytest.mark.usefixtures("installed")
def test_an_old_gpu_is_refused(monkeypatch):
    monkeypatch.setenv("BRL_JAX_GPU_CAPABILITY", "75")
    with pytest.raises(NotImplementedError, match=r"compute capability 8\.0 or more, got 7\.5"):
        call()


@pytest.mark.usefixtures("installed")
def test_interpretation_is_chosen_for_a_process(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    with pytest.raises(NotImplementedError, match="TRITON_INTERPRET=1 must be set before Triton is imported"):
        local_attention(X, X, X, local_window_size=3, implementation="triton_interpret")


@pytest.mark.usefixtures("installed")
def test_xla_is_the_default_where_users_interpret_their_kernels(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    x = jnp.sin(jnp.arange(float(X.size))).reshape(X.shape)
    expected = local_attention(x, x, x, local_window_size=3, implementation="xla")
    for function in (local_attention, jax.jit(local_attention, static_argnames="local_window_size")):
        np.testing.assert_allclose(function(x, x, x, local_window_size=3), expected, rtol=1e-6)
    by_name = jax.jit(lambda x: local_attention(x, x, x, local_window_size=3, implementation="triton"))
    with pytest.raises(
        NotImplementedError, match="TRITON_INTERPRET=1 must be unset before Triton is imported"
    ):
        by_name.trace(x).lower(lowering_platforms=("cuda",))


def test_the_default_does_without_triton(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    jax.jit(lambda x: local_attention(x, x, x, local_window_size=3)).trace(X).lower(
        lowering_platforms=("cuda",)
    )


def half(length=16, head_dim=8):
    return jnp.ones((1, length, 2, head_dim), jnp.bfloat16)


@pytest.mark.parametrize(
    ("query", "options", "why"),
    [
        (half(), {}, None),
        (half(), {"pattern": SlidingWindow(3, 5)}, None),
        (half(), {"pattern": SlidingWindow(3, 5), "is_causal": False}, "keys up to the query only"),
        (half(), {"pattern": BlockDiagonal(4)}, "a sliding window"),
        (X, {}, "bfloat16 or float16"),
        (half(15), {}, "an even number of tokens, got 15"),
        (half(head_dim=12), {}, "a multiple of 8 up to 128, got 12"),
        (half(head_dim=136), {}, "a multiple of 8 up to 128, got 136"),
        (half(), {"bias": ALiBi(alibi_slopes(2))}, "neither a bias nor lengths"),
        (half(), {"query_lengths": jnp.asarray([3])}, "neither a bias nor lengths"),
        (half(), {"key_lengths": jnp.asarray([3])}, "neither a bias nor lengths"),
        (half(), {"query_segments": jnp.zeros((1, 16), jnp.int32)}, "no segment_ids"),
        (half(), {"sinks": jnp.zeros(2)}, "no sinks"),
        (half(), {"logits_soft_cap": 5.0}, "no logits_soft_cap"),
        (half(), {"query_offset": 2}, "query_offset=0"),
        (half(14), {"keys": half()}, "equal numbers of queries and keys"),
    ],
)
def test_what_goes_to_cudnn_by_itself(query, options, why, monkeypatch):
    monkeypatch.setattr(cudnn, "cudnn_unsupported", lambda *arguments: None)
    options = {"pattern": SlidingWindow(3, 0), "is_causal": True, "query_offset": 0, "keys": query} | options
    keys = options.pop("keys")
    static = [options.pop(name, None) for name in ("pattern", "is_causal", "query_offset", "logits_soft_cap")]
    pattern, is_causal, offset, cap = static
    call = PatternCall(
        pattern=pattern,
        is_causal=is_causal,
        scale=0.5,
        num_queries=query.shape[1],
        num_keys=keys.shape[1],
        query_offset=offset,
        logits_soft_cap=cap,
    )
    found = cudnn.unsupported(call, CallArrays(query, keys, keys, **options))
    assert found is None if why is None else why in found


@pytest.mark.parametrize(("capability", "served"), [("75", False), ("80", True)])
def test_cudnn_wants_ampere(monkeypatch, capability, served):
    monkeypatch.setenv("BRL_JAX_GPU_CAPABILITY", capability)
    assert (cudnn_unsupported(lambda x: x, X) is None) == served
    reason = cudnn_unsupported(jax.nn.relu, "no array") if not served else ""
    assert served or reason == "the GPU must have compute capability 8.0 or more, got 7.5"


WINDOW = {"local_window_size": (63, 0), "is_causal": True}
# What a call lowered for a GPU contains: cuDNN, our kernels, or neither.
CUDNN, TRITON, XLA = "__cudnn$fmhaSoftmax", "triton_kernel_call_ffi", None
Q, FEW = half(256, 64), half(16, 64)
LOWERED = {
    "causal window": (lambda q: local_attention(q, q, q, **WINDOW), Q, CUDNN),
    "causal window under vmap": (lambda q: jax.vmap(lambda q: local_attention(q, q, q, **WINDOW))(q[None]), Q, CUDNN),
    "both sides": (lambda q: local_attention(q, q, q, local_window_size=4), Q, TRITON),
    "odd number of tokens": (lambda q: local_attention(q, q, q, **WINDOW), half(255, 64), TRITON),
    "float32": (lambda q: local_attention(q, q, q, **WINDOW), X.repeat(8, 1), TRITON),
    "segments": (
        lambda q: local_attention(q, q, q, segment_ids=jnp.zeros((1, 256), jnp.int32), **WINDOW), Q, TRITON,
    ),
    "sinks": (lambda q: local_attention(q, q, q, sinks=jnp.zeros(2), **WINDOW), Q, TRITON),
    "ALiBi": (lambda q: local_attention(q, q, q, bias=ALiBi(alibi_slopes(2)), **WINDOW), Q, XLA),
    "decoding step": (lambda q: local_attention(q[:, :1], q, q, query_offset=255, **WINDOW), Q, XLA),
    "xla": (lambda q: local_attention(q, q, q, implementation="xla", **WINDOW), Q, XLA),
    "compress": (lambda q: compress(FEW, q, q, q, gamma=0.5), Q, TRITON),
    "propagate": (lambda q: propagate(q, FEW, FEW, strength=0.5), Q, TRITON),
    "gau": (lambda q: gau_attention(q, q, q, is_causal=True), Q, TRITON),
    "gau's bias": (
        lambda q: gau_attention(q, q, q, bias=RotaryBias(jnp.ones((2, 4)), jnp.ones((2, 4))), is_causal=True),
        Q, TRITON,
    ),
    "gau with ALiBi": (lambda q: gau_attention(q, q, q, bias=ALiBi(alibi_slopes(2))), Q, XLA),
    "gau step": (lambda q: gau_attention(q[:, :1], q, q), Q, XLA),
    "compress blocks": (
        lambda q: compress_blocks(
            FEW[:, None].repeat(3, 1), q, q, q, gamma=0.5, block_size=64, history_size=128
        ), Q, TRITON,
    ),
    "full": (lambda q: full_attention(q, q, q, is_causal=True), Q, CUDNN),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("jax_triton", "jax_plugins")),
    reason="jax-triton or JAX's CUDA plugin is not installed (pip install '.[gpu]')",
)
@pytest.mark.parametrize("name", LOWERED)
def test_what_a_gpu_gets(name, monkeypatch):
    """Lowered for GPUs that this machine lacks, forward and with gradients; the T4 gets XLA."""
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns otherwise
    function, query, wanted = LOWERED[name]

    def calls(function):
        text = jax.jit(function).trace(query).lower(lowering_platforms=("cuda",)).as_text()
        return set(re.findall(r"custom_call @([\w$]+)", text)) & {CUDNN, f"{CUDNN}Backward", TRITON}

    assert calls(function) == ({wanted} if wanted else set())
    both = {None: set(), TRITON: {TRITON}, CUDNN: {CUDNN, f"{CUDNN}Backward"}}[wanted]
    assert calls(lambda q: jax.vjp(function, q)[1](function(q))) == both
    if wanted == TRITON:  # with several platforms in one program, the CPU's part never runs the kernel
        traced = jax.jit(function).trace(query)
        assert TRITON in traced.lower(lowering_platforms=("cpu", "cuda")).as_text()
    jax.clear_caches()
    monkeypatch.setenv("BRL_JAX_GPU_CAPABILITY", "75")
    assert calls(function) == set()
    jax.clear_caches()
