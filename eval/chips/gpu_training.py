"""What a network costs before its first training step on a GPU, for `eval.gpu_costs`: matrix products, compilation.

XLA times several forms of each matrix product outside kernels when it compiles for a device that is there, and that is
most of the wait for the first step. Without a device it has nothing to time.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from brl_jax.layers import MECHANISMS
from brl_jax.models import DecoderConfig, DecoderLM
from train.cli.command import GPU_OPTIONS_OFF

#: The mechanisms of the table; ratios are to the first.
NAMES = ("full", "local", "brl", "gated_deltanet", "mamba2")
#: The most products that XLA tunes, over full attention's.
MOST = 2.0
#: The options of `train` and `eval`, and XLA's autotuner of fusions: without a device it compiles all of them twice.
_OFF = (*GPU_OPTIONS_OFF, "xla_gpu_experimental_enable_fusion_autotuner")


def gradient(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
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


def measure(name: str, lower: Callable[[Callable[..., Any], Any], Any]) -> tuple[int, float, float]:
    """(products, seconds of processor time to trace and lower, and to compile) of a network's step."""
    function, arguments = gradient(name)
    start = _seconds()
    lowered = lower(function, arguments)
    middle = _seconds()
    compiled = lowered.compile(compiler_options=dict.fromkeys(_OFF, False))
    return tuned_products(compiled.as_text()), middle - start, _seconds() - middle


def _seconds() -> float:
    """Processor time of this process and of those that it started and that have ended, such as the assembler."""
    return sum(os.times()[:4])
