"""Times the attention functions side by side: python -m eval.speed.

Every candidate is first checked against a float64 reference on a sample of rows: a wrong result gets no
number. Then all are timed in turn, round by round, forward alone and forward with backward. The table shows
the fastest round, how many times as fast that is as PyTorch's full causal attention in the same rounds (as
this package's own where PyTorch is not installed), and the temporary memory of the compiled program. Ctrl-C
prints what was measured so far.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from brl_jax.attention.full import full_attention
from brl_jax.attention.local import local_attention
from brl_jax.attention.patterns import SlidingWindow
from train.config import parse_options
from train.errors import RunError, UserError, command


@dataclasses.dataclass(frozen=True)
class SpeedOptions:
    """What to time. All cases are causal self-attention."""

    lengths: tuple[int, ...] = (1024, 2048, 4096, 8192, 16384, 32768)
    """Sequence lengths."""
    mechanisms: tuple[str, ...] = ("full", "local")
    """Which of the known cases."""
    window: int = 256
    """Keys that a query of a local case sees, its own among them."""
    heads: int = 4
    """Heads of query, key and value."""
    head_dim: int = 64
    """Features of a head."""
    batch: int = 1
    """Sequences at once."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of query, key and value."""
    repeats: int = 7
    """Rounds; the fastest counts."""
    patience: float = 20.0
    """Seconds after which a slow candidate sits out the remaining rounds (it runs two at least)."""
    torch: bool = True
    """Time PyTorch's scaled_dot_product_attention too, where it is installed."""
    json: str | None = None
    """File to write the rows to, as one JSON object."""

    def __post_init__(self):
        for name in ("window", "heads", "head_dim", "batch", "repeats"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"lengths must be one or more numbers of at least 1, got {self.lengths}")
        for name in self.mechanisms:
            if name not in CASES:
                raise ValueError(f"mechanisms must be out of {', '.join(CASES)}, got {name}")


# --- The cases. A new mechanism joins by a line in CASES. ---

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]  # query, key, value, cotangent: (B, n, N, H)


@dataclasses.dataclass(frozen=True)
class Case:
    """An attention function to time.

    Attributes:
      function: from the options to f(query, key, value) -> out.
      reference: (options, arrays, rows, tail) -> float64 out[:, rows], d_query[:, rows], d_key[:, tail:] and
        d_value[:, tail:].
    """

    function: Callable[[SpeedOptions], Callable]
    reference: Callable[[SpeedOptions, Arrays, np.ndarray, int], tuple[np.ndarray, ...]]


def softmax_reference(sees: Callable[[SpeedOptions, Any, Any], Any]) -> Callable:
    """The reference of causal softmax attention in which query i sees key j where sees(options, i, j)."""

    def reference(
        options: SpeedOptions, arrays: Arrays, rows: np.ndarray, tail: int
    ) -> tuple[np.ndarray, ...]:
        query, key, value, d_out = (x.astype(np.float64) for x in arrays)
        scale = 1 / np.sqrt(query.shape[-1])
        visible = sees(options, rows[:, None], np.arange(key.shape[1])[None, :])
        scores = np.where(visible, scale * np.einsum("brnh,bsnh->bnrs", query[:, rows], key), -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        d_weights = np.einsum("brnh,bsnh->bnrs", d_out[:, rows], value)
        d_scores = scale * weights * (d_weights - (weights * d_weights).sum(-1, keepdims=True))
        # No query before the tail sees a key of the tail, and all queries of the tail are among the rows.
        last = rows >= tail
        d_key = np.einsum("bnrs,brnh->bsnh", d_scores[:, :, last, tail:], query[:, rows[last]])
        d_value = np.einsum("bnrs,brnh->bsnh", weights[:, :, last, tail:], d_out[:, rows[last]])
        out = np.einsum("bnrs,bsnh->brnh", weights, value)
        return out, np.einsum("bnrs,bsnh->brnh", d_scores, key), d_key, d_value

    return reference


def _full(options: SpeedOptions) -> Callable:
    return functools.partial(full_attention, is_causal=True)


def _local(options: SpeedOptions) -> Callable:
    pattern = SlidingWindow.of_width(options.window, is_causal=True)
    return functools.partial(local_attention, pattern=pattern, is_causal=True)


_FULL_REFERENCE = softmax_reference(lambda options, i, j: j <= i)

CASES: dict[str, Case] = {
    "full": Case(_full, _FULL_REFERENCE),
    "local": Case(_local, softmax_reference(lambda options, i, j: (j <= i) & (i - j < options.window))),
}
TORCH = "torch full"


# --- Candidates: a case at one length, ready to run. ---


class NoNumber(Exception):
    """Why a candidate gets no number at this length."""


@dataclasses.dataclass
class Candidate:
    """Two programs to time, forward and forward + backward, and where their results go."""

    name: str
    forward: Callable[[], Any]
    both: Callable[[], Any]
    temp_bytes: tuple[int | None, int | None]
    seconds: list[list[float]] = dataclasses.field(default_factory=lambda: [[], []])


def available_bytes() -> int:
    """Memory that a program may still take: the device's own, or this machine's."""
    stats = jax.local_devices()[0].memory_stats() or {}
    if "bytes_limit" in stats:
        return stats["bytes_limit"] - stats.get("bytes_in_use", 0)
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def jax_candidate(name: str, function: Callable, arrays: Arrays, options: SpeedOptions) -> Candidate:
    """Compiles a function; NoNumber where its temporary memory would not fit."""
    query, key, value, d_out = (jnp.asarray(x, options.dtype) for x in arrays)

    def both(query, key, value, d_out):
        out, pull = jax.vjp(function, query, key, value)
        return out, *pull(d_out)

    programs = [
        jax.jit(function).lower(query, key, value).compile(),
        jax.jit(both).lower(query, key, value, d_out).compile(),
    ]
    analyses: list[Any] = [p.memory_analysis() for p in programs]
    temp = [analysis.temp_size_in_bytes for analysis in analyses]
    room = available_bytes()
    if max(temp) > 0.8 * room:
        raise NoNumber(
            f"needs {max(temp) / 2**30:.1f} GiB of temporary memory, {room / 2**30:.1f} GiB are there"
        )
    return Candidate(
        name,
        lambda: jax.block_until_ready(programs[0](query, key, value)),
        lambda: jax.block_until_ready(programs[1](query, key, value, d_out)),
        (temp[0], temp[1]),
    )


def torch_candidate(arrays: Arrays, options: SpeedOptions) -> Candidate:
    """PyTorch's full causal attention, in its own layout (B, N, n, H) and on its own threads."""
    import torch

    def load(x: np.ndarray):
        return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 2, 1, 3))).to(
            getattr(torch, options.dtype)
        )

    query, key, value, d_out = (load(x) for x in arrays)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=True)
    learned = [x.clone().requires_grad_() for x in (query, key, value)]

    def forward():
        with torch.no_grad():
            return attend(query, key, value)

    def both():
        out = attend(*learned)
        return out, *torch.autograd.grad(out, learned, d_out)

    return Candidate(TORCH, forward, both, (None, None))


def to_numpy(x: Any) -> np.ndarray:
    """A result (B, n, N, H) of either library in float32."""
    if isinstance(x, jax.Array):
        return np.asarray(x.astype(jnp.float32))
    return x.detach().float().numpy().transpose(0, 2, 1, 3)


def verify(
    candidate: Candidate, expected: tuple[np.ndarray, ...], rows: np.ndarray, tail: int, dtype: str
) -> None:
    """NoNumber unless output and gradients equal the reference; both programs run, and so are warm."""
    tolerance = {"float32": 1e-4, "bfloat16": 2e-2}[dtype]
    alone = to_numpy(candidate.forward())[:, rows]
    out, d_query, d_key, d_value = (to_numpy(x) for x in candidate.both())
    results = {
        "forward": (alone, expected[0]),
        "output": (out[:, rows], expected[0]),
        "query's gradient": (d_query[:, rows], expected[1]),
        "key's gradient": (d_key[:, tail:], expected[2]),
        "value's gradient": (d_value[:, tail:], expected[3]),
    }
    for what, (got, right) in results.items():
        # Of a single token's softmax the gradient is 0, and its error is one of rounding.
        error = float(np.linalg.norm(got - right)) / max(float(np.linalg.norm(right)), 1e-2)
        if not error <= tolerance:
            raise NoNumber(
                f"WRONG RESULT: {what} is off by {error:.1e} of its norm, at most {tolerance:.0e} allowed"
            )


# --- Measuring ---


def measure(options: SpeedOptions, length: int, rows: list[dict], progress: Progress) -> None:
    """Checks and times all candidates at one length; appends their rows, also when interrupted."""
    rng = np.random.default_rng(length)
    shape = (options.batch, length, options.heads, options.head_dim)

    def draw() -> np.ndarray:
        # Through the dtype and back, so that the reference starts from the same numbers.
        return np.asarray(jnp.asarray(rng.standard_normal(shape), options.dtype).astype(jnp.float32))

    arrays = (draw(), draw(), draw(), draw())
    tail = max(0, length - 64)
    sample = np.union1d(rng.integers(0, length, 32), np.arange(tail, length))

    candidates, notes = [], {}
    makers: dict[str, tuple[Callable[[], Candidate], Callable]] = {
        name: (
            functools.partial(jax_candidate, name, CASES[name].function(options), arrays, options),
            CASES[name].reference,
        )
        for name in options.mechanisms
    }
    if has_torch(options):
        makers[TORCH] = (functools.partial(torch_candidate, arrays, options), _FULL_REFERENCE)
    task = progress.add_task(f"n = {length}: checking", total=len(makers))
    try:
        for name, (make, reference) in makers.items():
            try:
                candidate = make()
                verify(candidate, reference(options, arrays, sample, tail), sample, tail, options.dtype)
                candidates.append(candidate)
            except NoNumber as reason:
                notes[name] = str(reason)
            progress.advance(task)
        progress.reset(task, description=f"n = {length}: timing", total=options.repeats * len(candidates))
        for _ in range(options.repeats):
            for candidate in candidates:
                spent = sum(map(sum, candidate.seconds))
                if spent < options.patience or len(candidate.seconds[1]) < 2:
                    for program, seconds in zip((candidate.forward, candidate.both), candidate.seconds):
                        start = time.perf_counter()
                        program()
                        seconds.append(time.perf_counter() - start)
                progress.advance(task)
    finally:
        rows.extend(as_rows(length, candidates, notes))
        progress.remove_task(task)


def as_rows(length: int, candidates: list[Candidate], notes: dict[str, str]) -> list[dict]:
    """A JSON-ready row for each candidate that has a number or a reason for having none."""
    best = {c.name: [min(s, default=None) for s in c.seconds] for c in candidates}
    base = best.get(TORCH) or best.get("full") or [None, None]
    rows = []
    for c in candidates:
        ratios = [b / own if b and own else None for b, own in zip(base, best[c.name])]
        rows.append(
            {
                "length": length,
                "name": c.name,
                "forward_s": best[c.name][0],
                "forward_backward_s": best[c.name][1],
                "forward_ratio": ratios[0],
                "forward_backward_ratio": ratios[1],
                "forward_temp_bytes": c.temp_bytes[0],
                "forward_backward_temp_bytes": c.temp_bytes[1],
                "rounds": len(c.seconds[1]),
                "note": "",
            }
        )
    return rows + [{"length": length, "name": name, "note": note} for name, note in notes.items()]


def has_torch(options: SpeedOptions) -> bool:
    return options.torch and importlib.util.find_spec("torch") is not None


def as_table(rows: list[dict], options: SpeedOptions) -> Table:
    base = TORCH if has_torch(options) else "full"
    table = Table(
        title=f"causal attention: batch {options.batch}, {options.heads} heads of {options.head_dim}, "
        f"{options.dtype}, window {options.window} on {jax.devices()[0].device_kind}"
    )
    table.add_column("n", justify="right")
    table.add_column("case")
    for column in ("forward ms", f"x {base}", "fwd+bwd ms", f"x {base}", "fwd temp MiB", "fwd+bwd temp MiB"):
        table.add_column(column, justify="right")

    def show(value: float | None, unit: float, digits: int) -> str:
        return "-" if value is None else f"{value / unit:.{digits}f}"

    for row in rows:
        if row["note"]:
            table.add_row(str(row["length"]), row["name"], *["-"] * 6)
            continue
        table.add_row(
            str(row["length"]),
            row["name"],
            show(row["forward_s"], 1e-3, 2),
            show(row["forward_ratio"], 1, 2),
            show(row["forward_backward_s"], 1e-3, 2),
            show(row["forward_backward_ratio"], 1, 2),
            show(row["forward_temp_bytes"], 2**20, 1),
            show(row["forward_backward_temp_bytes"], 2**20, 1),
        )
    return table


# (length, which ratio, how it reads, at least): what local attention is held to, with the options' defaults.
TARGETS = (
    (8192, "forward_ratio", "forward", 6.0),
    (8192, "forward_backward_ratio", "forward + backward", 8.0),
    (32768, "forward_ratio", "forward", 20.0),
)


def target_lines(rows: list[dict], options: SpeedOptions) -> list[str]:
    """How local attention stands against its targets, for those lengths that were measured beside PyTorch."""
    default = SpeedOptions()
    same = ("window", "heads", "head_dim", "batch", "dtype")
    if not has_torch(options) or any(getattr(options, n) != getattr(default, n) for n in same):
        return []
    ratios = {row["length"]: row for row in rows if row["name"] == "local" and not row["note"]}
    lines = []
    for length, which, words, least in TARGETS:
        ratio = ratios.get(length, {}).get(which)
        if ratio is not None:
            verdict = "met" if ratio >= least else "NOT met"
            lines.append(
                f"n = {length}, {words}: local attention is {ratio:.1f} times as fast as PyTorch's full causal "
                f"attention; target {least:.0f}: {verdict}"
            )
    return lines


def write_json(path: Path, rows: list[dict], options: SpeedOptions) -> None:
    text = json.dumps({"options": dataclasses.asdict(options), "rows": rows}, indent=1) + "\n"
    part = path.with_name(path.name + ".part")
    part.write_text(text)
    part.replace(path)


def main(argv: Sequence[str]) -> None:
    """Prints the table; see the module's text and --help."""
    options = parse_options(
        SpeedOptions(), argv, prog="python -m eval.speed", about="Times the attention functions side by side."
    )
    path = None if options.json is None else Path(options.json)
    if path is not None and (path.is_dir() or not os.access(path.parent, os.W_OK)):
        raise UserError(f"--json: expected a file in a folder that can be written to, got {path}")
    console = Console()
    if options.torch and not has_torch(options):
        console.print("PyTorch is not installed: no rows for it; ratios are to this package's full attention")
    rows: list[dict] = []
    try:
        with Progress(console=Console(stderr=True), transient=True) as progress:
            for length in options.lengths:
                measure(options, length, rows, progress)
    finally:
        console.print(as_table(rows, options))
        notes = [f"{row['name']} at n = {row['length']}: {row['note']}" for row in rows if row["note"]]
        for line in notes + target_lines(rows, options):
            console.print(line, highlight=False, soft_wrap=True)
        if path is not None:
            write_json(path, rows, options)
    wrong = [f"{row['name']} at n = {row['length']}" for row in rows if "WRONG" in row["note"]]
    if wrong:
        raise RunError(f"wrong results: {', '.join(wrong)}")


if __name__ == "__main__":
    sys.exit(command(main, "eval.speed"))
