"""A gradient launches its forward kernels once.

XLA merges a second run of a kernel with the first one in a plain program, but not in a scan over layers, whose forward
and backward passes are two loops.
"""

import collections
import importlib.util

import jax
import jax.numpy as jnp
import pytest
from jax.interpreters import partial_eval

import brl_jax as bj
from brl_jax.attention.core.by_platform import platform_jaxpr

LENGTH, HEADS, HEAD_DIM = 1024, 2, 64


def half(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)


TOKENS, FEW = half(1, LENGTH, HEADS, HEAD_DIM), half(1, 16, HEADS, HEAD_DIM)
QKV, BLOCKS = (TOKENS, TOKENS, TOKENS), half(1, 3, 16, HEADS, HEAD_DIM)
NUMBERS = jax.ShapeDtypeStruct((1, LENGTH, HEADS), jnp.float32)
CUDNN = {"implementation": "cudnn"}
LENGTHS = {"key_value_seq_lengths": jnp.asarray([LENGTH - 3])}


def _window(*qkv, **options):
    return bj.local_attention(*qkv, local_window_size=(63, 0), is_causal=True, **options)


def _compress_blocks(*arrays):
    return bj.compress_blocks(*arrays, gamma=0.5, block_size=256, history_size=512)


def _native_sparse(q, k, v):
    sizes = bj.BlockSizes(compressed=32, stride=16, selected=64, blocks=4)
    blocks = (bj.compression_blocks(x, sizes).mean(2) for x in (k, v))
    return bj.native_sparse_attention(q, k, v, *blocks, q[..., :3], sizes=sizes, window=64)


def _by_feature(key):
    return -jax.nn.softplus(key.astype(jnp.float32))


def _linear(*qkv, **options):
    return bj.linear_attention(*qkv, is_causal=True, normalize=not options, **options)


#: Calls by name, each with the shapes of its arrays and the platforms that have a kernel for it.
CALLS = {
    "full": (lambda *x: bj.full_attention(*x, is_causal=True), QKV, "tpu cuda"),
    "full cudnn": (lambda *x: bj.full_attention(*x, **CUDNN, **LENGTHS), QKV, "cuda"),
    "local": (_window, QKV, "tpu cuda"),
    "local cudnn": (lambda *x: _window(*x, **CUDNN, **LENGTHS), QKV, "cuda"),
    "local vmap": (lambda *x: jax.vmap(_window)(*(y[None] for y in x)), QKV, "tpu cuda"),
    "local ahead": (lambda *x: bj.local_attention(*x, local_window_size=63), QKV, "tpu cuda"),
    "local sinks": (lambda *x: _window(*x, sinks=jnp.zeros(HEADS)), QKV, "tpu cuda"),
    "local strided": (lambda *x: bj.local_attention(*x, pattern=bj.Strided(32), is_causal=True), QKV, "tpu"),
    "compress": (lambda *x: bj.compress(*x, gamma=0.5), (FEW, *QKV), "tpu cuda"),
    "compress one": (lambda q, k, v: bj.compress(q, k, None, v, gamma=None), (FEW, *QKV[1:]), "tpu cuda"),
    "compress relu2": (lambda *x: bj.compress(*x, gamma=0.5, score="relu2"), (FEW, *QKV), "tpu cuda"),
    "compress_blocks": (_compress_blocks, (BLOCKS, *QKV), "tpu cuda"),
    "propagate": (lambda *x: bj.propagate(*x, strength=0.5), (TOKENS, FEW, FEW), "tpu cuda"),
    "native_sparse": (_native_sparse, QKV, "tpu cuda"),
    "hopfield": (lambda *x: bj.hopfield_attention(*x, steps=2), QKV, "tpu cuda"),
    "gau": (lambda *x: bj.gau_attention(*x, is_causal=True), QKV, "cuda"),
    "linear": (_linear, QKV, "tpu cuda"),
    "gla": (lambda q, k, v: _linear(q, k, v, log_decay=_by_feature(k)), QKV, "tpu cuda"),
    "delta": (lambda *x: bj.delta_rule(*x[:3], beta=x[3]), (*QKV, NUMBERS), "tpu cuda"),
    "kimi_delta": (
        lambda *x: bj.kimi_delta_rule(*x[:3], beta=x[3], log_decay=_by_feature(x[1])),
        (*QKV, NUMBERS), "tpu cuda",
    ),
}  # fmt: skip
#: Strided keeps the log-sum-exp of one of its two kernels. Recurrences compute again what their gradients read, in KDA
#: 2.4 times the bytes of queries, keys and values, because each platform's form has other shapes for it.
AGAIN = {"local strided", "linear", "gla", "delta", "kimi_delta"}
_WITH_GPU = all(importlib.util.find_spec(name) is not None for name in ("jax_triton", "jax_plugins"))
_CASES = [
    pytest.param(
        name, platform,
        marks=[
            *([] if name == "compress_blocks" else [pytest.mark.slow]),
            *([] if platform == "tpu" or _WITH_GPU else [pytest.mark.skip("pip install '.[gpu]'")]),
        ],
    )
    for name, (_, _, platforms) in CALLS.items() for platform in platforms.split()
]  # fmt: skip


def kernels(jaxpr, platform):
    """How often a closed jaxpr's program for a platform launches each kernel; unused results do not count."""
    used, _ = partial_eval.dce_jaxpr(jaxpr.jaxpr, [True] * len(jaxpr.jaxpr.outvars))
    found = collections.Counter()
    for equation in used.eqns:
        name, params = equation.primitive.name, equation.params
        if name == "pallas_call":
            found[params["name"]] += 1
        elif name == "gpu_kernel_launch":
            found[params["kernel"].__name__] += 1
        elif name.startswith("dot_product_attention"):
            found[name] += 1
        else:
            form = platform_jaxpr(equation, platform)
            inner = list(params.values()) if form is None else [form]
            for value in jax.tree.leaves(inner, is_leaf=lambda x: hasattr(x, "jaxpr")):
                if hasattr(value, "jaxpr"):
                    found += kernels(value, platform)
    return found


@pytest.mark.parametrize(("name", "platform"), _CASES)
def test_the_gradient_runs_the_forward_kernels_once(name, platform, monkeypatch):
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # Triton 3.9 warns otherwise
    call, shapes, _ = CALLS[name]
    gradient = jax.grad(lambda *x: call(*x).astype(jnp.float32).sum(), tuple(range(len(shapes))))
    forward, both = (kernels(jax.make_jaxpr(f)(*shapes), platform) for f in (call, gradient))
    assert forward
    assert any(both[kernel] > count for kernel, count in forward.items()) == (name in AGAIN)
