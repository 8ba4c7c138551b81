"""How fast a run trains: tokens a second, MFU, goodput, waiting for input."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from train.engine.batch import Arrays, num_rows
from train.engine.flops import matrix_flops
from train.engine.step import Objective

#: bfloat16 operations per second of a device, without sparsity, by how JAX names its kind (the longest name that the
#: kind begins with counts), from the makers' data sheets. A device is a chip, but half of one on TPU7x.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "TPU7x": 1154e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
}


def peak_flops(kind: str) -> float | None:
    """The operations per second of a device of this kind (`jax.Device.device_kind`); None if it is not known."""
    names = [name for name in PEAK_FLOPS if kind.lower().startswith(name.lower())]
    return PEAK_FLOPS[max(names, key=len)] if names else None


def step_flops(objective: Objective, params: Any, batch: Arrays) -> float:
    """Operations of the matrix products of one training step: three times the forward pass's, as the backward
    pass has two products for each, or one where weights are not trained. Rematerialised operations do not count.

    Counts the products in the model's XLA implementation, including masked parts of blocks. The compiler's own
    analysis would leave out kernels and custom calls, and would count loops once.
    """
    arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in batch.items()}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    memory = jax.eval_shape(lambda: objective.init_memory(num_rows(arrays)))

    def loss(params: Any, memory: Any, batch: Any) -> Any:
        return objective.sums(params, memory, batch, jax.random.key(0))[0]["loss"]

    passes = 3 if objective.trained is None else 2
    return passes * matrix_flops(jax.jit(loss).trace(shapes, memory, arrays).jaxpr, "cpu")


class Meter:
    """The speed of a run in this process."""

    def __init__(self, objective: Objective, kind: str, count: int):
        self._objective, self._count, self._peak = objective, count, peak_flops(kind)
        self._flops: dict[Any, float] = {}
        self._began = time.perf_counter()
        self._waited = 0.0
        # The calls that have compiled, by their steps and shapes, and whether one did since the last reading.
        self._compiled: set[Any] = set()
        self._compiling = False
        # Over all calls except those that compile: seconds, tokens, operations, seconds of waiting.
        self._totals = [0.0, 0.0, 0.0, 0.0]

    @contextlib.contextmanager
    def input(self) -> Iterator[None]:
        """The time in which the next batch is read."""
        before = time.perf_counter()
        yield
        self._waited += time.perf_counter() - before

    def flops(self, params: Any, batch: Arrays) -> float:
        """`step_flops` if the devices' peak is known, else 0."""
        if self._peak is None:
            return 0.0
        shapes = tuple((name, x.shape) for name, x in batch.items())
        if shapes not in self._flops:
            self._flops[shapes] = step_flops(self._objective, params, batch)
        return self._flops[shapes]

    def started(self, count: int, batch: Arrays) -> None:
        """A call of `count` steps on such batches was handed to the devices; the first of its kind compiled."""
        kind = (count, *(x.shape for x in batch.values()))
        if kind not in self._compiled:
            self._compiled.add(kind)
            self._compiling = True

    def call(self, tokens: int, flops: float, seconds: float) -> dict[str, float]:
        """The speed of a call of one or more steps, for their lines in metrics.jsonl; `seconds` since the last one."""
        waited, self._waited = min(self._waited, seconds), 0.0
        if not self._compiling:
            added = (seconds, tokens, flops, waited)
            self._totals = [total + more for total, more in zip(self._totals, added)]
        self._compiling = False
        return self._rates(seconds, tokens, flops, waited)

    def summary(self) -> dict[str, float]:
        """The speed of all calls of this process except those that compile; empty if there was no other."""
        return self._rates(*self._totals) if self._totals[0] else {}

    def _rates(self, seconds: float, tokens: float, flops: float, waited: float) -> dict[str, float]:
        rates = {
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_device": tokens / seconds / self._count,
            "input_wait": waited / seconds,
            "goodput": self._totals[0] / (time.perf_counter() - self._began),
        }
        if self._peak is not None:
            rates["mfu"] = flops / seconds / self._count / self._peak
        return rates


def in_words(rates: Mapping[str, float]) -> str:
    """The speed of a run as a line."""
    words = [
        f"{rates['tokens_per_second']:,.0f} tokens/s",
        f"{rates['tokens_per_second_per_device']:,.0f} a device",
        *([f"MFU {rates['mfu']:.1%}"] if "mfu" in rates else []),
        f"goodput {rates['goodput']:.1%}",
        f"waiting for input {rates['input_wait']:.1%}",
    ]
    return f"speed: {', '.join(words)}"
