"""PyTorch's FlexAttention and flash-linear-attention in a process of `eval.gpu_check`, which imports nothing of ours.

It is run as a file, without PYTHONPATH: PyTorch's compiler wants the Triton that PyTorch came with.
"""

from __future__ import annotations

import functools
import importlib
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

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


def measure(task: dict, turn: Callable[[Callable[[], Any]], Any]) -> dict:
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
    seconds = [turn(functools.partial(seconds_a_call, torch, run)) for run in (forward, both)]
    return {"ms": seconds[0] * 1e3, "ms_both": seconds[1] * 1e3, "by": f"torch {torch.__version__}"}


def main() -> None:
    """Serves the parent; see `eval.chips.gpu_worker`."""
    lines = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def send(message: dict) -> None:
        lines.write(json.dumps(message) + "\n")
        lines.flush()

    def turn(timed: Callable[[], Any]) -> Any:
        send({"event": "ready"})
        if sys.stdin.readline().strip() != "go":
            sys.exit(0)
        try:
            return timed()
        finally:
            send({"event": "timed"})

    send({"event": "hello"})
    for line in iter(sys.stdin.readline, ""):
        task = json.loads(line)
        try:
            row = measure(task, turn)
        except ImportError as error:
            row = {"note": f"not available: {' '.join(str(error).split())[:160]}"}
        except Exception as error:
            row = {"note": f"FAILED: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
        send({"event": "row", "row": {**task, **row}})
        send({"event": "done"})


if __name__ == "__main__":
    main()
