"""The task of `python -m train.copy`: an encoder-decoder that copies symbols, or writes a text to another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

from jaxtyping import Array

from brl_jax.layers import (
    BRLConfig,
    FullConfig,
    LinformerConfig,
    LocalConfig,
    PerformerConfig,
    ReformerConfig,
    SynthesizerConfig,
)
from brl_jax.models import EncoderDecoder, EncoderDecoderConfig
from train.data.copying import (
    SPECIAL,
    CopyDataConfig,
    HeldOutPairs,
    PairStream,
    TextPairs,
    load_pairs,
)
from train.data.drawn import DrawnBatches, HeldOutDrawn
from train.engine.batch import Arrays, HeldOut, Stream
from train.engine.config import LoopConfig
from train.engine.fields import Decided, Flat
from train.engine.optimizer import OptimizerConfig
from train.engine.step import Objective, outputs
from train.tasks.lm import vocabulary
from train.tasks.run_config import RunConfig
from train.tasks.task import TOKEN, Task, classifier_objective, shapes


@dataclasses.dataclass(frozen=True)
class CopyModelConfig(EncoderDecoderConfig):
    """The network."""

    vocab_size: Decided[int] = 34
    lora_rank: Decided[int] = 0
    lora_alpha: Decided[float] = 16.0


@dataclasses.dataclass(frozen=True)
class CopyConfig(RunConfig):
    """An encoder-decoder trained to write a target to a source."""

    data: Annotated[CopyDataConfig, Flat]
    model: Annotated[CopyModelConfig, Flat]


def _brl(window: int, compressed: int, block: int, history: int, **options: Any) -> dict[str, Any]:
    mechanism = BRLConfig(
        window=window, num_compressed=compressed, block_size=block, history_size=history, beta=0.5, **options
    )
    return {"mechanism": mechanism, "cross_window": window}


def _mixers(window: int, projected: int, length: int) -> dict[str, dict[str, Any]]:
    """The rows of BRL-Attention's table 8 except BRL, at these sizes. What has no causal form (Linformer, ETC,
    BigBird) is in the encoder, with full or local attention in the decoder."""
    local = {"mechanism": LocalConfig(window=window), "cross_window": window}
    grid = max(2, round(length**0.5))
    of_all: dict[str, Any] = {"window": window, "num_global": max(1, window // 4)}
    linformer = LinformerConfig(num_projected=projected, max_length=4 * length)
    buckets = max(2, length // window * 2)
    return {
        "full": {"mechanism": FullConfig()},
        "local": local,
        "strided": {"mechanism": LocalConfig(window=grid, pattern="strided")},
        "axial": {"mechanism": LocalConfig(pattern="axial", grid_width=grid)},
        "etc": {**local, "encoder_mechanism": LocalConfig(pattern="global", **of_all)},
        "bigbird": {**local, "encoder_mechanism": LocalConfig(pattern="bigbird", **of_all)},
        "reformer": {"mechanism": ReformerConfig(num_buckets=buckets, chunk_size=window)},
        "synthesizer": {"mechanism": SynthesizerConfig(max_length=4 * length + 2)},
        "performer": {"mechanism": PerformerConfig()},
        "linformer": {"mechanism": FullConfig(), "encoder_mechanism": linformer},
    }


def _small(mixers: dict[str, Any]) -> CopyConfig:
    """Minutes on one CPU core: 2 + 2 layers that copy up to 64 of 32 symbols."""
    return CopyConfig(
        loop=LoopConfig(steps=300, batch=32, eval_every=50, checkpoint_every=100, keep_checkpoints=1),
        data=CopyDataConfig(length=(64,), min_length=16),
        model=CopyModelConfig(num_layers=2, encoder_layers=2, d_model=64, num_heads=4, d_ff=128, **mixers),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, weight_decay=0.0),
    )


def _figure5(mixers: dict[str, Any]) -> CopyConfig:
    """BRL-Attention, section 3.1 and figure 5: one layer of encoder, eight of decoder, 8 heads, width 512, batch 16,
    and sources of 200 to 2,000 symbols (`--length`). The symbols, steps and learning rate are our choice."""
    return CopyConfig(
        loop=LoopConfig(steps=10_000, batch=16, eval_every=500, checkpoint_every=500),
        data=CopyDataConfig(length=(2000,), min_length=2000),
        model=CopyModelConfig(num_layers=8, encoder_layers=1, d_model=512, num_heads=8, d_ff=2048, **mixers),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=1_000),
    )


def _paper_sizes() -> dict[str, dict[str, Any]]:
    """The networks of figure 5 at its sizes, and the ones of table 8 that it leaves out.

    In BRL each token is read by the compressed tokens of one block, as in the language models of section A.2. A target
    has no earlier outputs to read, so the memory is each layer's own.
    """
    others = _mixers(100, 128, 2048)
    papers: dict[str, Any] = {"compress_scale": "m1", "compress_positions": "none"}
    return {
        **{name: mixers for name, mixers in others.items() if name not in ("local", "linformer")},
        **{f"linformer-{k}": _mixers(100, k, 2048)["linformer"] for k in (64, 128, 256)},
        **{f"local-{w}": _mixers(w, 128, 2048)["local"] for w in (50, 100)},
        **{f"brl-{w}-{m}": _brl(w, m, 512, 512, **papers) for w in (50, 100) for m in (10, 50, 100)},
    }


_SMALL = {"brl": _brl(8, 16, 16, 64), **_mixers(8, 32, 64)}

PRESETS: dict[str, CopyConfig] = {
    **{f"copy-{name}": _small(mixers) for name, mixers in _SMALL.items()},
    **{f"figure5-{name}": _figure5(mixers) for name, mixers in _paper_sizes().items()},
}


def copy_objective(model: EncoderDecoder, z_loss: float) -> Objective:
    """Cross-entropy and accuracy of each target token from the source and the target's tokens before it, on what
    `train.data.copying.draw_pairs` returns."""

    def logits(params: Any, batch: Arrays, key: Array | None) -> Array:
        inputs = batch["tokens"], batch["source"]
        return outputs(model, params, key, *inputs, source_lengths=batch["source_lengths"])[0]

    return classifier_objective(model, (TOKEN, TOKEN), logits, z_loss)


class CopyTask(Task[CopyConfig, TextPairs | None]):
    """Pairs of a source and a target. Symbols are drawn as they are needed, so there is nothing to load (None)."""

    name = "copy"
    about = "Trains an encoder-decoder to copy, or on pairs of texts."
    config_class = CopyConfig
    presets = PRESETS
    default_preset = "copy-brl"
    is_sized_by_data = True
    network = EncoderDecoder
    following = ("eval.copy --workdir {run}", "eval.copy --table {run} --picture {run}/copy.png")

    def sized(self, config: CopyConfig, data: TextPairs | None = None) -> CopyConfig:
        """Sets the size of the vocabulary to the number of symbols, or of the tokenizer's tokens, plus two special
        tokens, and fixes what follows the length at the longest text."""
        if not config.data.data_dir:
            size = config.data.vocabulary
        else:
            size = vocabulary(config.data.tokenizer) if data is None else data.tokenizer.vocab_size
        model = config.model.for_training(config.data.longest + 1)
        return dataclasses.replace(config, model=dataclasses.replace(model, vocab_size=size + SPECIAL))

    def objective(self, model: EncoderDecoder, config: CopyConfig) -> Objective:
        return copy_objective(model, config.z_loss)

    def batch_shapes(self, config: CopyConfig, rows: int) -> dict[str, Any]:
        longest = config.data.longest
        target = (rows, longest + 1)
        source = (rows, longest + SPECIAL if config.data.data_dir else longest)
        integers = {"tokens": target, "source": source, "source_lengths": (rows,), "targets": target}
        return shapes(integers, {"weights": target})

    def load(self, config: CopyConfig, splits: Sequence[str]) -> TextPairs | None:
        return load_pairs(config.data, config.loop.workdir, splits) if config.data.data_dir else None

    def describe_data(self, config: CopyConfig, data: TextPairs | None) -> str:
        if data is None:
            lengths = ", ".join(map(str, config.data.length))
            symbols = f"up to {lengths} symbols out of {config.data.vocabulary}"
            return f"{config.data.order} of {symbols}, drawn while training"
        counts = ", ".join(f"{len(examples):,} pairs {split}" for split, examples in data.examples.items())
        return f"{config.data.data_dir} as {data.tokenizer.description}, {counts}"

    def training_batches(self, config: CopyConfig, data: TextPairs | None, **options: Any) -> Stream:
        if data is None:
            return DrawnBatches(config.data, **options)
        return PairStream(data.examples["train"], buckets=config.data.buckets, **options)

    def held_out_batches(
        self, config: CopyConfig, data: TextPairs | None, split: str, **options: Any
    ) -> HeldOut:
        if data is None:
            return HeldOutDrawn(config.data, split=split, **options)
        return HeldOutPairs(data.examples[split], buckets=config.data.buckets, **options)


COPY = CopyTask()
