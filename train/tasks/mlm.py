"""The task of `python -m train.mlm`: an encoder that predicts masked tokens of a text."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

from jax.sharding import Mesh
from jaxtyping import Array

from brl_jax.fields import Range
from brl_jax.layers import (
    BRLConfig,
    FlashConfig,
    FullConfig,
    GAUConfig,
    LinearConfig,
    LocalConfig,
    LongShortConfig,
    Mechanism,
    NormConfig,
    PerformerConfig,
)
from brl_jax.models import EncoderConfig, MaskedLM
from brl_jax.models.transnormer import TRANSNORMER_SIZES, Variant, transnormer
from train.data.dataset import DataConfig, load, training_batches
from train.data.masking import MaskedBatches, MaskedHeldOut, num_asked
from train.data.streams import EvalStream
from train.engine.batch import Arrays, HeldOut
from train.engine.errors import UserError
from train.engine.fields import Decided, Flat
from train.engine.mesh import host_rows
from train.engine.optimizer import OptimizerConfig
from train.engine.step import Objective, means, outputs, perplexity
from train.tasks.lm import LmData, TextTask, vocabulary_of
from train.tasks.lm_config import LmLoopConfig, long_loop
from train.tasks.run_config import RunConfig
from train.tasks.task import TOKEN, classifier_objective, shapes

# Tokens of the network beyond the tokenizer's: the mask, and what separates two sentences.
MASK, SEPARATOR, SPECIAL = 0, 1, 2
Pack = Literal["auto", "always", "never"]


@dataclasses.dataclass(frozen=True)
class MlmDataConfig(DataConfig):
    """The text of a run, how it becomes tokens, and how many of them are masked."""

    mask_share: Annotated[float, Range(above=0, below=1)] = 0.15
    """Share of a row's tokens that the network must predict."""
    pack: Pack = "auto"
    """Whether the documents of a row are kept apart, so that none sees another: always, never, or (auto) where the
    mechanism can and the text has more than one (docs/packing.md)."""

    def __post_init__(self):
        super().__post_init__()
        if self.data.startswith("hf-stream:"):
            raise UserError(
                f"--data: expected a text whose tokens are made first, such as tokens:DIR (python -m "
                f"train.tokenize), got {self.data}"
            )


@dataclasses.dataclass(frozen=True)
class MlmModelConfig(EncoderConfig):
    """The network."""

    inputs: Decided[str] = "embed"  # type: ignore[assignment]
    pooling: Decided[str] = "mean"  # type: ignore[assignment]
    num_features: Decided[int] = 1
    vocab_size: Decided[int] = 256
    num_classes: Decided[int] = 2
    max_length: Decided[int] = 1024


@dataclasses.dataclass(frozen=True)
class MlmConfig(RunConfig):
    """An encoder trained to predict masked tokens of a text."""

    loop: Annotated[LmLoopConfig, Flat]
    data: Annotated[MlmDataConfig, Flat]
    model: Annotated[MlmModelConfig, Flat]

    def __post_init__(self):
        if self.data.pack == "always" and not self.model.packs:
            kind = next(each.name for each in self.model.mechanisms if not each.packs_bidirectional)
            raise ValueError(
                f"pack must be auto or never with {kind}, which cannot pack in an encoder, got always"
            )


def _small(mechanism: Mechanism) -> MlmConfig:
    """Two CPU cores, minutes: the standard library's sources in 2,048 byte pairs."""
    return MlmConfig(
        loop=LmLoopConfig(
            steps=1000, batch=32, length=128, eval_every=250, checkpoint_every=250, eval_tokens=65_536
        ),
        data=MlmDataConfig(tokenizer="bpe:2048"),
        model=MlmModelConfig(num_layers=2, d_model=128, num_heads=4, d_ff=256, mechanism=mechanism),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
    )


def _uncased() -> MlmConfig:
    """English text as lower-case words: what a network of this size learns from them carries over to GLUE's sentences
    with any case and spacing. A quarter of the tokens are masked, which costs less time than reading more text."""
    return _small(FullConfig()).changed(
        loop={"steps": 2000, "batch": 16},
        data={"tokenizer": "bpe-uncased:8192", "mask_share": 0.25},
        model={"num_heads": 2},
    )


def _roberta(model: MlmModelConfig) -> MlmConfig:
    """TransNormer, table 13: RoBERTa's base network on WikiText-103."""
    return MlmConfig(
        loop=long_loop(50_000, 512, accumulation=16, length=512, eval_every=1_000),
        data=MlmDataConfig(
            data="hf:Salesforce/wikitext:wikitext-103-raw-v1",
            tokenizer="hf:FacebookAI/roberta-base",
            documents="wikitext",
        ),
        model=dataclasses.replace(model, dropout=0.1),
        optimizer=OptimizerConfig(
            learning_rate=5e-4,
            warmup_steps=3_000,
            decay="linear",
            final_share=0.0,
            beta2=0.98,
            epsilon=1e-6,
            weight_decay=0.01,
            clip_norm=0.0,
        ),
    )


def _base(mechanism: Mechanism, layers: int = 12, **options: Any) -> MlmConfig:
    """The other networks of table 5; the ones without feed-forward networks have twice the layers. Attention dropout
    is for softmax attention alone."""
    return _roberta(
        MlmModelConfig(
            num_layers=layers,
            d_model=768,
            num_heads=12,
            d_ff=3072,
            ffn="gelu",
            use_bias=True,
            positions="learned",
            mechanism=mechanism,
            **options,
        )
    )


def _transnormer(variant: Variant, **options: Any) -> MlmConfig:
    sizes = {**TRANSNORMER_SIZES["roberta"], **options}
    return _roberta(transnormer(variant, MlmModelConfig, positions="learned", **sizes))


_VANILLA = FullConfig(dropout=0.1)
# TransNormer's tables 8 to 12, by what they change. A plain network with the parameters of the GLU is 3/2 as wide.
_ABLATIONS: dict[str, dict[str, Any]] = {
    **{f"-{early}-{12 - early}": {"early_layers": early} for early in (0, 3, 9, 12)},
    "-norm-first": {"swap_mechanisms": True},
    "-ffn": {"ffn": "gelu", "d_ff": 3072},
    "-block-32": {"block_size": 32},
    "-block-128": {"block_size": 128},
    "-d-n": {"schedule": "alternate"},
    "-n-d": {"schedule": "alternate", "swap_mechanisms": True},
    "-parallel": {"schedule": "parallel"},
}

PRESETS: dict[str, MlmConfig] = {
    "mlm": _small(BRLConfig(window=64, num_compressed=32)),
    "mlm-full": _small(FullConfig()),
    "mlm-local": _small(LocalConfig(window=64)),
    "mlm-uncased": _uncased(),
    "roberta-full": _base(_VANILLA),
    "roberta-brl": _base(BRLConfig(window=128, num_compressed=128, beta=0.5)),
    "roberta-flash-quad": _base(GAUConfig(), layers=24),
    "roberta-flash": _base(FlashConfig(), layers=24),
    "roberta-long-short": _base(LongShortConfig(num_projected=32)),
    "roberta-performer": _base(PerformerConfig()),
    "roberta-linear": _base(LinearConfig()),
    "roberta-linear-unscaled": _base(LinearConfig(normalize=False)),
    "roberta-norm": _base(NormConfig(feature_map="elu+1")),
    "roberta-linear-full": _base(LinearConfig(), late_mechanism=_VANILLA),
    "roberta-full-linear": _base(_VANILLA, late_mechanism=LinearConfig()),
    **{
        f"roberta-transnormer-{variant}{name}": _transnormer(variant, **options)
        for variant in get_args(Variant)
        for name, options in {"": {}, **_ABLATIONS}.items()
    },
}


def mlm_objective(model: MaskedLM, z_loss: float = 0.0) -> Objective:
    """Cross-entropy and accuracy at the masked places of what `train.data.masking.mask_tokens` returns and, optionally,
    "segment_ids": (B, T) int32, which keep the documents of a packed row apart."""

    def logits(params: Any, batch: Arrays, key: Array | None) -> Array:
        options = {"lengths": batch["lengths"], "segment_ids": batch.get("segment_ids")}
        return outputs(model, params, key, batch["tokens"], batch["places"], **options)

    return classifier_objective(model, (TOKEN, TOKEN), logits, z_loss)


def masked_shapes(rows: int, length: int, share: float) -> dict[str, Any]:
    """The arrays of a batch of `train.data.masking.mask_tokens`."""
    asked = (rows, num_asked(length, share))
    integers = {"tokens": (rows, length), "places": asked, "targets": asked, "lengths": (rows,)}
    return shapes(integers, {"weights": asked})


def masked_measures(sums: Mapping[str, float]) -> dict[str, Any]:
    """Of the masked tokens: accuracy, perplexity, loss in nats, and how many they are."""
    loss, accuracy = (means(sums)[name] for name in ("loss", "accuracy"))
    tokens = round(sums["weight"])
    return {"accuracy": accuracy, "perplexity": perplexity(loss), "loss": loss, "tokens": tokens}


class MlmTask(TextTask[MlmConfig]):
    """Masked language modeling; rows are pieces of the text, without memory, whose documents may be kept apart."""

    name = "mlm"
    about = "Trains an encoder to predict masked tokens of text."
    config_class = MlmConfig
    presets = PRESETS
    default_preset = "mlm"
    network = MaskedLM
    following = ("eval.mlm --workdir {run}",)

    def sized(self, config: MlmConfig, data: LmData | None = None) -> MlmConfig:
        """Sets the size of the vocabulary, which is the tokenizer's plus two special tokens, and whether rows are
        packed, which depends on the mechanism and the text. A text that was not read counts as many documents."""
        size = vocabulary_of(config.data, data)
        # Of the rows' length here, so that it is the same network on the shorter rows of train.glue.
        model = config.model.for_training(config.loop.length)
        model = dataclasses.replace(model, vocab_size=size + SPECIAL, max_length=config.loop.length)
        pack = config.data.pack
        if pack == "auto":
            many = data is None or any(len(corpus.starts) > 1 for corpus in data.corpora.values())
            pack = "always" if config.model.packs and many else "never"
        return dataclasses.replace(config, model=model, data=dataclasses.replace(config.data, pack=pack))

    def objective(self, model: MaskedLM, config: MlmConfig) -> Objective:
        return mlm_objective(model, config.z_loss)

    def batch_shapes(self, config: MlmConfig, rows: int) -> dict[str, Any]:
        masked = masked_shapes(rows, config.loop.length, config.data.mask_share)
        return masked if config.data.pack == "never" else masked | {"segment_ids": masked["tokens"]}

    def load(self, config: MlmConfig, splits: Sequence[str]) -> LmData:
        tokenizer, corpora = load(config.data, config.loop.workdir, splits)
        if any(text.is_weighted for text in corpora.values()):
            raise UserError("--data: a masked language model takes no weights of documents; expected none")
        return LmData(tokenizer, corpora, None)

    def _masking(self, config: MlmConfig, data: LmData) -> dict[str, Any]:
        size = data.tokenizer.vocab_size
        return {"vocab_size": size, "mask": size + MASK, "share": config.data.mask_share}

    def training_batches(self, config: MlmConfig, data: LmData, **options: Any) -> MaskedBatches:
        segments = config.data.pack != "never"
        rows: Any = training_batches(
            data.corpora["train"], length=config.loop.length, segments=segments, **options
        )
        return MaskedBatches(rows, **options, **self._masking(config, data))

    def held_out(  # type: ignore[override]
        self, config: MlmConfig, data: LmData, split: str, mesh: Mesh | None = None, *, limit: int = 0
    ) -> HeldOut:
        """One pass over a split, or its first `limit` tokens (0: all); on a mesh, the rows of this process."""
        batch = max(1, min(config.loop.microbatch, len(data.corpora[split].tokens) // config.loop.length))
        options = {"batch": batch, "rows": host_rows(mesh, batch), "limit": limit or None}
        return self.held_out_batches(config, data, split, **options)

    def held_out_batches(self, config: MlmConfig, data: LmData, split: str, **options: Any) -> MaskedHeldOut:
        segments = config.data.pack != "never"
        text = EvalStream(data.corpora[split], length=config.loop.length, segments=segments, **options)
        return MaskedHeldOut(text, rows=options["rows"], **self._masking(config, data))

    def measures(
        self, config: MlmConfig, data: LmData, split: str, held_out: HeldOut, sums: Mapping[str, float]
    ) -> dict[str, Any]:
        return masked_measures(sums)

    def describe_data(self, config: MlmConfig, data: LmData) -> str:
        counts = ", ".join(f"{len(corpus.tokens):,} tokens {split}" for split, corpus in data.corpora.items())
        documents = sum(len(corpus.starts) for corpus in data.corpora.values())
        packed = "" if config.data.pack == "never" else f", rows of {documents:,} documents kept apart"
        return f"{config.data.data} as {data.tokenizer.description}, {counts}{packed}"


MLM = MlmTask()
