"""PyTorch's FlexAttention and flash-linear-attention in a process of `eval.gpu_check`, without JAX.

It runs without PYTHONPATH: PyTorch's compiler wants the Triton that PyTorch came with.
"""

from __future__ import annotations

import functools
import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from eval.chips.gpu_worker import Worker, serve

#: flash-linear-attention's functions: module, name, and which of beta, a log-decay by head or by feature they take.
FLA = {
    "fla linear": ("linear_attn", "chunk_linear_attn", ()),
    "fla scalar_decay": ("simple_gla", "chunk_simple_gla", ("g",)),
    "fla gla": ("gla", "chunk_gla", ("gk",)),
    "fla delta": ("delta_rule", "chunk_delta_rule", ("beta",)),
    "fla gated_delta": ("gated_delta_rule", "chunk_gated_delta_rule", ("g", "beta")),
    "fla kda": ("kda", "chunk_kda", ("gk", "beta")),
}


def flex(torch: Any, size: dict, query: Any) -> tuple[Callable[..., Any], bool]:
    """FlexAttention with a causal window, whose arrays have heads before tokens."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    window, n = size["window"], size["n"]
    mask = create_block_mask(lambda b, h, i, j: (j <= i) & (i - j < window), None, None, n, n, device="cuda")
    attend: Any = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: attend(q, k, v, block_mask=mask), True


def of_fla(name: str) -> Callable[..., tuple[Callable[..., Any], bool]]:
    def make(torch: Any, size: dict, query: Any) -> tuple[Callable[..., Any], bool]:
        module, function, takes = FLA[name]
        call = getattr(importlib.import_module(f"fla.ops.{module}"), function)
        shape = query.shape[:3]
        more = {
            "beta": lambda: torch.full(shape, 0.5, device="cuda", dtype=query.dtype),
            "g": lambda: torch.full(shape, -0.1, device="cuda"),
            "gk": lambda: torch.full(query.shape, -0.1, device="cuda"),
        }
        options = {("g" if x == "gk" else x): more[x]() for x in takes}
        unit = "beta" in takes

        def run(q: Any, k: Any, v: Any) -> Any:
            k = torch.nn.functional.normalize(k.float(), dim=-1).to(k.dtype) if unit else k
            return call(q, k, v, **options)[0]

        return run, False

    return make


def seconds_a_call(torch: Any, run: Callable[[], Any]) -> float:
    """The median over rounds of back-to-back calls, by the device's events."""
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    run()
    torch.cuda.synchronize()
    calls = max(2, min(500, math.ceil(0.02 / (time.perf_counter() - start))))
    times = []
    for _ in range(3):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            run()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def measure(task: dict, worker: Worker) -> Iterator[dict]:
    """The times of one function, forward and with its gradients."""
    import torch

    size = task["size"]
    shape = (1, size["n"], size["heads"], size["head_dim"])
    make = flex if task["operation"] == "flex local" else of_fla(task["operation"])
    arrays = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
    function, heads_first = make(torch, size, arrays[0])
    if heads_first:
        arrays = [x.transpose(1, 2).contiguous() for x in arrays]
    query, key, value, cotangent = arrays
    learned = [x.clone().requires_grad_() for x in (query, key, value)]

    def forward() -> Any:
        with torch.no_grad():
            return function(query, key, value)

    def both() -> Any:
        return torch.autograd.grad(function(*learned), learned, cotangent)

    for run in (forward, both):  # compile before the turn at the GPU
        run()
    torch.cuda.synchronize()
    seconds = [worker.turn(functools.partial(seconds_a_call, torch, run)) for run in (forward, both)]
    yield {"ms": seconds[0] * 1e3, "ms_both": seconds[1] * 1e3, "by": f"torch {torch.__version__}"}


if __name__ == "__main__":
    serve(lambda: {"event": "hello"}, measure)
