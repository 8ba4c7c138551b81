"""The task of `python -m train.copy`: an encoder-decoder that copies symbols, or writes a text to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from brl_jax.models import EncoderDecoder
from train.data.copying import (
    SPECIAL,
    HeldOutPairs,
    HeldOutSymbols,
    PairStream,
    SymbolStream,
    TextPairs,
    load_pairs,
)
from train.engine.batch import Arrays, HeldOut, Stream
from train.engine.mesh import host_rows
from train.engine.mup import make_rates
from train.engine.step import Objective, classification, outputs, weighted_sums
from train.tasks.copy_config import PRESETS, CopyConfig
from train.tasks.lm import vocabulary
from train.tasks.task import Task


def copy_objective(model: EncoderDecoder, z_loss: float = 0.0) -> Objective:
    """Cross-entropy and accuracy of each target token from the source and the target's tokens before it, on what
    `train.data.copying.draw_pairs` returns."""

    def init(key: Array) -> Any:
        tokens = jnp.zeros((1, 1), jnp.int32)
        return model.init(key, tokens, tokens)["params"]

    def loss(params: Any, memory: Any, batch: Arrays, key: Array | None):
        inputs = batch["tokens"], batch["source"]
        logits, *_ = outputs(model, params, key, *inputs, source_lengths=batch["source_lengths"])
        nll, right = classification(logits, batch["targets"], key, z_loss)
        return weighted_sums(nll, batch["weights"], memory, accuracy=right)

    return Objective(init, loss, averages=("accuracy",), rates=make_rates(model.config))


class CopyTask(Task[CopyConfig, TextPairs | None]):
    """Pairs of a source and a target. Symbols are drawn as they are needed, so there is nothing to load (None)."""

    name = "copy"
    about = "Trains an encoder-decoder to copy, or on pairs of texts."
    config_class = CopyConfig
    presets = PRESETS
    default_preset = "copy-brl"
    is_sized_by_data = True

    def sized(self, config: CopyConfig, data: TextPairs | None = None) -> CopyConfig:
        """The symbols or the tokenizer, and the two special tokens, decide the size of the vocabulary, and the longest
        text what follows the length."""
        if not config.data.data_dir:
            size = config.data.vocabulary
        else:
            size = vocabulary(config.data.tokenizer) if data is None else data.tokenizer.vocab_size
        model = config.model.for_training(config.data.longest + 1)
        return dataclasses.replace(config, model=dataclasses.replace(model, vocab_size=size + SPECIAL))

    def model(self, config: CopyConfig) -> EncoderDecoder:
        return EncoderDecoder(config.model)

    def objective(self, model: EncoderDecoder, config: CopyConfig) -> Objective:
        return copy_objective(model, config.z_loss)

    def batch_shapes(self, config: CopyConfig, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        longest = config.data.longest
        shapes = {
            "tokens": (rows, longest + 1),
            "source": (rows, longest + SPECIAL if config.data.data_dir else longest),
            "source_lengths": (rows,),
            "targets": (rows, longest + 1),
        }
        return {
            **{name: jax.ShapeDtypeStruct(shape, jnp.int32) for name, shape in shapes.items()},
            "weights": jax.ShapeDtypeStruct(shapes["targets"], jnp.float32),
        }

    def load(self, config: CopyConfig, splits: Sequence[str]) -> TextPairs | None:
        return load_pairs(config.data, config.loop.workdir, splits) if config.data.data_dir else None

    def describe_data(self, config: CopyConfig, data: TextPairs | None) -> str:
        if data is None:
            lengths = ", ".join(map(str, config.data.length))
            return f"{config.data.order} of up to {lengths} symbols of {config.data.vocabulary}, drawn while training"
        counts = ", ".join(f"{len(examples):,} pairs {split}" for split, examples in data.examples.items())
        return f"{config.data.data_dir} as {data.tokenizer.description}, {counts}"

    def next_commands(self, config: CopyConfig, data: TextPairs | None) -> Sequence[Sequence[str]]:
        workdir = config.loop.workdir
        picture = str(Path(workdir) / "copy.png")
        return (
            ("eval.copy", "--workdir", workdir),
            ("eval.copy", "--table", workdir, "--picture", picture),
        )

    def training_stream(self, config: CopyConfig, data: TextPairs | None, mesh: Mesh) -> Stream:
        options: dict[str, Any] = {
            "batch": config.loop.batch,
            "seed": config.loop.seed,
            "rows": host_rows(mesh, config.loop.batch),
        }
        if data is None:
            return SymbolStream(config.data, **options)
        return PairStream(data.examples["train"], buckets=config.data.buckets, **options)

    def held_out(
        self,
        config: CopyConfig,
        data: TextPairs | None,
        split: str,
        mesh: Mesh | None = None,
        lengths: Sequence[int] | None = None,
    ) -> HeldOut:
        """One pass over a split; for symbols, `lengths` are its rows' (see `HeldOutSymbols`)."""
        batch = config.loop.microbatch
        rows = None if mesh is None else host_rows(mesh, batch)
        if data is None:
            return HeldOutSymbols(config.data, split=split, lengths=lengths, batch=batch, rows=rows)
        return HeldOutPairs(data.examples[split], buckets=config.data.buckets, batch=batch, rows=rows)


COPY = CopyTask()
