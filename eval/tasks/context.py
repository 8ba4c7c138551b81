"""Where a language model's context pays: python -m eval.context --workdir DIR [DIR ...] [--picture FILE.png].

The held-out text is read twice, with the memory carried from row to row and with an empty memory at the start of each
row. The losses of the single targets are averaged over all of them, by the position in the block, and by the distance
from the token that predicts a target to the target's last occurrence before it, or to that of the N tokens that end
with it (--ngram N):

    within reach    what layers of the window see without compressed tokens
    history         from there to the farthest token that BRL's compressed tokens of one layer read
    beyond          farther back in the text
    new             no occurrence since the start of the stream

Several runs are measured by the same boundaries: the shortest reach, the longest history and the shortest block among
them, or those of the options. Prints a table as markdown, or with --json True a JSON object for each run.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brl_jax.layers import BRLConfig
from brl_jax.models import DecoderConfig, DecoderLM
from eval.harness.pictures import picture_path, save
from eval.harness.runs import Run, open_run
from eval.tasks.context_table import draw, markdown
from eval.tasks.reach import window_reach
from train.cli.options import parse_options
from train.cli.summary import mechanism_names
from train.data.corpus import Corpus
from train.engine.errors import UserError
from train.tasks.lm import LM, held_out_stream
from train.tasks.lm_config import LmConfig

# Parts that a block is cut into for the loss by position.
_PARTS = 16
_LOSSES = ("carried", "cleared")


@dataclasses.dataclass(frozen=True)
class ContextOptions:
    """What to measure."""

    workdir: tuple[str, ...] = ("runs/small",)
    """Folders of the runs, side by side."""
    data: str | None = None
    """A text to read in place of the run's own, as for train.lm; the run's tokenizer encodes it."""
    split: Literal["valid", "test"] = "valid"
    """Which part of the text."""
    checkpoint: str = "best"
    """best (lowest held-out loss), last, or a step."""
    tokens: int = 100_000
    """Tokens of the text to read; 0: all."""
    ngram: int = 1
    """Tokens that must have occurred together; 1: the target alone."""
    reach: int | None = None
    """Tokens that a prediction sees without memory; None: by the runs' windows and layers."""
    history: int | None = None
    """Tokens back from a prediction to the farthest that compressed tokens read; None: by the runs' blocks."""
    block: int | None = None
    """Tokens of a block; None: by the runs' blocks."""
    json: bool = False
    """Print a JSON object for each run in place of the table."""
    picture: str | None = None
    """File to draw the runs in (PNG)."""

    def __post_init__(self):
        if not self.workdir:
            raise ValueError("workdir must be one or more folders, got none")
        if self.tokens < 0 or self.tokens == 1:
            raise ValueError(f"tokens must be at least 2, or 0 for all, got {self.tokens}")
        for name, least in (("ngram", 1), ("reach", 0), ("history", 1), ("block", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")


class Boundaries(NamedTuple):
    """Distances in tokens: what layers see without compressed tokens, what these read, and the length of a block."""

    reach: int
    history: int
    block: int


def boundaries(config: DecoderConfig, length: int) -> Boundaries:
    """Those of a decoder that reads rows of a length; where a mechanism has no window, its reach is the row."""
    memories = [m for m in config.mechanisms if isinstance(m, BRLConfig) and m.num_compressed]
    return Boundaries(
        window_reach(config.mechanisms, length + 1),
        max((m.history + m.block - 1 for m in memories), default=length),
        min([*(m.block for m in memories), length]),
    )


def last_distances(stream: Int[np.ndarray, " N"], ngram: int) -> Int[np.ndarray, " M"]:
    """For each target stream[1:], how many tokens before its predecessor the same n-gram ended last; -1 for none.

    0 means that the predecessor itself ended it. Targets with fewer than ngram - 1 tokens before them have -1.
    """
    length = len(stream)
    if length < ngram:
        return np.full(length - 1, -1)
    tokens = names = np.unique(stream, return_inverse=True)[1].reshape(-1).astype(np.int64)
    for i in range(1, ngram):
        # An n-gram's name is that of the one without its last token, and this token.
        names = np.unique(names[:-1] * length + tokens[i:], return_inverse=True)[1].reshape(-1)
    order = np.argsort(names, kind="stable")
    found = np.full(len(names), -1)
    repeats = names[order[1:]] == names[order[:-1]]
    found[order[1:]] = np.where(repeats, order[1:] - order[:-1] - 1, -1)
    return np.concatenate([np.full(ngram - 1, -1), found])[1:]


def token_losses(
    model: DecoderLM, params: Any, memory: Any, tokens: Int[Array, "B T"], targets: Int[Array, "B T"]
) -> tuple[Float[Array, "B T"], Any]:
    """The loss of each target in nats, and the new memory. The logits exist for one row at a time."""
    variables = {"params": params}
    hidden, memory = model.apply(variables, tokens, memory=memory, method="hidden")

    def row(xs: Any) -> Any:
        logits: Any = model.apply(variables, xs[0][None], method="logits")
        return jax.nn.logsumexp(logits[0], -1) - jnp.take_along_axis(logits[0], xs[1][:, None], 1)[:, 0]

    return jax.lax.map(row, (hidden, targets)), memory


def read_losses(run: Run, corpus: Corpus, limit: int) -> dict[str, np.ndarray]:
    """The text as its rows read it, each one a stream: arrays (rows, N) of the stream's batches one after the other.

    "tokens", "targets", "weights", and the losses "carried" and "cleared", with and without the memory of the batches
    before.
    """
    config: LmConfig = run.config
    step = jax.jit(
        lambda params, memory, tokens, targets: token_losses(run.model, params, memory, tokens, targets)
    )
    held_out = held_out_stream(corpus, config, limit)
    empty = memory = run.model.init_memory(held_out.batch)
    read: list[dict[str, np.ndarray]] = []
    for batch in held_out:
        arrays = (jnp.asarray(batch["tokens"]), jnp.asarray(batch["targets"]))
        carried, memory = step(run.params, memory, *arrays)
        # Without a memory, the second reading would repeat the first.
        cleared = carried if empty is None else step(run.params, empty, *arrays)[0]
        shown = {name: batch[name] for name in ("tokens", "targets", "weights")}
        read.append({**shown, "carried": np.asarray(carried), "cleared": np.asarray(cleared)})
    return {name: np.concatenate([part[name] for part in read], axis=1) for name in read[0]}


def _averages(read: dict[str, np.ndarray], chosen: np.ndarray) -> dict[str, Any]:
    """The number of some of the targets, and their losses; None where there are none."""
    chosen = chosen & (read["weights"] > 0)
    count = int(chosen.sum())
    losses = {name: float(read[name][chosen].mean(dtype=np.float64)) if count else None for name in _LOSSES}
    return {"targets": count, **losses}


def summarise(read: dict[str, np.ndarray], length: int, borders: Boundaries, ngram: int) -> dict[str, Any]:
    """The losses of `read_losses` in all, by position and by distance; rows of a batch have `length` tokens."""
    streams = np.concatenate([read["tokens"], read["targets"][:, -1:]], axis=1)
    distance = np.stack([last_distances(stream, ngram) for stream in streams])
    place = np.broadcast_to(np.arange(distance.shape[1]) % length % borders.block, distance.shape)
    part = -(-borders.block // min(_PARTS, borders.block))
    regions = {
        "within reach": (distance >= 0) & (distance <= borders.reach),
        "history": (distance > borders.reach) & (distance <= borders.history),
        "beyond": distance > max(borders.reach, borders.history),
        "new": distance < 0,
    }
    farthest = max(1, int(distance.max()))
    edges = [0, *(2**i for i in range(farthest.bit_length() + 1))]
    return {
        **_averages(read, np.ones(distance.shape, bool)),
        "regions": {name: _averages(read, chosen) for name, chosen in regions.items()},
        "by_position": [
            {"first": first, **_averages(read, (place >= first) & (place < first + part))}
            for first in range(0, borders.block, part)
        ],
        "by_distance": [
            {"first": low, "end": high, **_averages(read, (distance >= low) & (distance < high))}
            for low, high in itertools.pairwise(edges)
        ],
    }


def measure(options: ContextOptions) -> list[dict[str, Any]]:
    """The JSON object of each run.

    Raises:
      UserError: there is no run or checkpoint, or its text cannot be read.
    """
    runs = [open_run([LM], workdir, options.checkpoint) for workdir in options.workdir]
    own = [boundaries(run.config.model, run.config.loop.length) for run in runs]
    borders = Boundaries(
        min(each.reach for each in own) if options.reach is None else options.reach,
        max(each.history for each in own) if options.history is None else options.history,
        min(each.block for each in own) if options.block is None else options.block,
    )
    results = []
    for run in runs:
        config = run.config
        if options.data is not None:
            config = dataclasses.replace(config, data=dataclasses.replace(config.data, data=options.data))
        corpus = LM.load(config, (options.split,)).corpora[options.split]
        if len(corpus.tokens) < 2:
            raise UserError(f"--data: evaluation takes at least 2 tokens, got {len(corpus.tokens)}")
        read = read_losses(run._replace(config=config), corpus, options.tokens)
        results.append(
            {
                "workdir": config.loop.workdir,
                "mechanism": mechanism_names(config.model),
                "step": run.step,
                "split": options.split,
                "length": config.loop.length,
                "ngram": options.ngram,
                **borders._asdict(),
                **summarise(read, config.loop.length, borders, options.ngram),
            }
        )
    return results


def main(argv: Sequence[str]) -> None:
    """Prints the table or the JSON objects, and draws the picture; see the module's docstring and --help."""
    options = parse_options(
        ContextOptions(), argv, prog="python -m eval.context", about="Where a language model's context pays."
    )
    picture = picture_path(options.picture)
    results = measure(options)
    if options.json:
        for result in results:
            print(json.dumps(result), flush=True)
    else:
        print(markdown(results))
    if picture is not None:
        save(draw(results), picture)
