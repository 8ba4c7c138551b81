"""The task of `python -m train.lm`: a decoder that predicts the next token of a text."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array, Int

from brl_jax.decoding import generate
from brl_jax.layers.core.modules import LORA
from brl_jax.models import DecoderLM, huggingface
from train.data.corpus import Corpus
from train.data.dataset import DataConfig, load, training_batches
from train.data.packed import PackedHeldOut, PackedStreams
from train.data.streams import EvalStream
from train.data.tokenizers.base import Tokenizer, continuation, encode_given
from train.data.tokenizers.named import load_tokenizer
from train.data.tokenizers.published import PUBLISHED_SIZES, PretrainedTokenizer, is_pretrained
from train.engine.batch import Arrays, HeldOut, Stream
from train.engine.errors import UserError
from train.engine.evaluation import held_out_metrics
from train.engine.hosts import is_lead
from train.engine.mesh import host_rows
from train.engine.metrics import log
from train.engine.step import Objective, outputs, perplexity
from train.tasks.conversion import Matching, convert_onto, matching_config, naming
from train.tasks.lm_config import PRESETS, LmConfig
from train.tasks.task import TOKEN, C, Streams, Task, objective_of, shapes

# Tokens of held-out text that the sample continues where no prompt is given.
_SAMPLE_CONTEXT = 64
_SAMPLE_TEMPERATURE = 0.8


class LmData(NamedTuple):
    """A text: its tokenizer, its splits (`train.data.dataset.load`), and the tokens that the sample continues (None
    without a training split)."""

    tokenizer: Tokenizer
    corpora: Mapping[str, Any]
    prompt: Int[np.ndarray, " P"] | None


def lm_objective(
    model: DecoderLM, z_loss: float = 0.0, start: Callable[[Any], Any] = lambda params: params
) -> Objective:
    """Next-token prediction on {"tokens", "targets": (B, T) int32} and, optionally, "weights": (B, T) float32,
    "segment_ids": (B, T) int32, which keep the documents of a packed row apart, and "positions": (B, T) int32.

    Args:
      z_loss: see `brl_jax.models.losses.cross_entropy`; for training alone.
      start: see `Objective`.
    """

    def loss(params: Any, memory: Any, batch: Arrays, key: Array | None):
        options = {
            "segment_ids": batch.get("segment_ids"),
            "positions": batch.get("positions"),
            "z_loss": 0.0 if key is None else z_loss,
        }
        inputs = batch["tokens"], batch["targets"], batch.get("weights")
        return outputs(model, params, key, *inputs, memory=memory, **options, method="loss")

    trained = (lambda path: path[-1] in LORA) if model.config.lora_rank else None
    return objective_of(model, [TOKEN], loss, init_memory=model.init_memory, start=start, trained=trained)


def _weights_of(folder: str, params: Any) -> Any:
    """The weights of a folder in the layout of transformers, in the place of a run's fresh parameters."""
    with naming("--from_hf"):
        return huggingface.load_onto(params, folder)


def keeps_documents(config: LmConfig) -> bool:
    """Whether rows hold whole documents that do not see each other: with JSON lines, if the layers can keep documents
    apart."""
    return config.data.data.startswith("jsonl:") and all(each.packs for each in config.model.mechanisms)


# A pass over held-out text has fewer rows than a training batch if it would have fewer batches than this.
_BATCHES = 4


def held_out_stream(corpus: Corpus, config: LmConfig, limit: int, mesh: Mesh | None = None) -> EvalStream:
    """One pass over a held-out corpus, or its first `limit` tokens (0: all), in batches of a microbatch's
    shape; on a mesh, the rows of this process."""
    # A short text in many rows would be read almost without past, and without a batch into which a memory is carried.
    tokens = min(len(corpus.tokens), limit or len(corpus.tokens))
    rows = max(1, min(config.loop.microbatch, tokens // (_BATCHES * config.loop.length)))
    return EvalStream(
        corpus,
        batch=rows,
        length=config.loop.length,
        limit=limit or None,
        rows=host_rows(mesh, rows),
    )


def vocabulary(tokenizer: str) -> int:
    """The size of a tokenizer's vocabulary, from its name. Raises UserError if the name does not give it."""
    if tokenizer == "bytes":
        return 256
    if tokenizer in PUBLISHED_SIZES:
        return PUBLISHED_SIZES[tokenizer]
    if is_pretrained(tokenizer):
        return PretrainedTokenizer.open(tokenizer).vocab_size
    size = re.fullmatch(r"(?:bpe:|bpe-uncased:|words:max=|chars:max=)(\d+)", tokenizer)
    if size is None:
        raise UserError(
            "--tokenizer: expected bytes, bpe:SIZE, bpe-uncased:SIZE or words:max=SIZE (or chars:max=SIZE), whose size "
            f"is known without the text, got {tokenizer!r}"
        )
    return int(size[1])


def vocabulary_of(config: DataConfig, data: LmData | None) -> int:
    """The size of the vocabulary of a run's text: from the data if they have been read, else from the options."""
    if data is not None:
        return data.tokenizer.vocab_size
    if config.data.startswith("tokens:"):
        return load_tokenizer(Path(config.data.removeprefix("tokens:")).expanduser()).vocab_size
    return vocabulary(config.tokenizer)


class TextTask(Task[C, LmData]):
    """What tasks on a text have in common: evaluations on the way may read a part of the held-out text only."""

    is_sized_by_data = True

    def streams(self, config: Any, data: LmData, mesh: Mesh) -> Streams:
        held_out = self.held_out(config, data, "valid", mesh, limit=config.loop.eval_tokens)
        whole = self.held_out(config, data, "valid", mesh) if config.loop.full_eval else held_out
        return Streams(self.training_stream(config, data, mesh), held_out, whole)


class LmTask(TextTask[LmConfig]):
    """Next-token prediction; the memory of a row is carried from batch to batch."""

    name = "lm"
    about = "Trains a decoder language model on text."
    config_class = LmConfig
    presets = PRESETS
    default_preset = "stdlib"
    network = DecoderLM

    def sized(self, config: LmConfig, data: LmData | None = None) -> LmConfig:
        """Sets the size of the vocabulary from the tokenizer, unless the weights have it, and fixes what follows the
        length at the rows'."""
        size = vocabulary_of(config.data, data)
        if config.pretrained is not None:
            if size > config.model.vocab_size:
                option = "--convert_from" if config.convert_from else "--from_hf"
                raise UserError(
                    f"{option}: the tokenizer has {size} tokens, and the network's embedding has "
                    f"{config.model.vocab_size}; expected a tokenizer that fits"
                )
            size = config.model.vocab_size
        model = dataclasses.replace(config.model.for_training(config.loop.length), vocab_size=size)
        return dataclasses.replace(config, model=model)

    def objective(self, model: DecoderLM, config: LmConfig) -> Objective:
        if config.convert_from:
            return lm_objective(model, config.z_loss, functools.partial(convert_onto, config))
        if not config.from_hf:
            return lm_objective(model, config.z_loss)
        return lm_objective(model, config.z_loss, functools.partial(_weights_of, config.from_hf))

    def before(self, config: LmConfig) -> tuple[LmTask, LmConfig] | None:
        matching = matching_config(config)
        return None if matching is None else (LM_MATCHING, matching)

    def batch_shapes(self, config: LmConfig, rows: int) -> dict[str, Any]:
        tokens = (rows, config.loop.length)
        if not keeps_documents(config):
            return shapes({"tokens": tokens, "targets": tokens}, {})
        return shapes({"tokens": tokens, "targets": tokens, "segment_ids": tokens}, {"weights": tokens})

    def row_length(self, config: LmConfig) -> int:
        return config.loop.length

    def load(self, config: LmConfig, splits: Sequence[str]) -> LmData:
        theirs = _tokenizer_of_run(config) if "train" in splits else None
        tokenizer, corpora = load(config.data, config.loop.workdir, splits, given=theirs)
        if theirs is not None and not tokenizer.equals(theirs):
            raise UserError(
                f"--convert_from: {config.convert_from} has another tokenizer than {config.data.data}"
            )
        # The prompt is encoded before training, so that a bad one is an error at once.
        prompt = _sample_prompt(config, tokenizer, corpora["valid"]) if "train" in splits else None
        return LmData(tokenizer, corpora, prompt)

    def training_batches(self, config: LmConfig, data: LmData, **options: Any) -> Stream:
        batches = PackedStreams if keeps_documents(config) else training_batches
        return batches(data.corpora["train"], length=config.loop.length, **options)

    def held_out(  # type: ignore[override]
        self, config: LmConfig, data: LmData, split: str, mesh: Mesh | None = None, *, limit: int = 0
    ) -> HeldOut:
        """One pass over a split, or its first `limit` tokens (0: all); on a mesh, the rows of this process."""
        if not keeps_documents(config):
            return held_out_stream(data.corpora[split], config, limit, mesh)
        return super().held_out(config, data, split, mesh, limit=limit or None)

    def held_out_batches(self, config: LmConfig, data: LmData, split: str, **options: Any) -> HeldOut:
        return PackedHeldOut(data.corpora[split], length=config.loop.length, **options)

    def measures(
        self, config: LmConfig, data: LmData, split: str, held_out: HeldOut, sums: Mapping[str, float]
    ) -> dict[str, Any]:
        """Perplexity (per token), bits per byte (of the original text, so that tokenizers compare), loss in nats."""
        metrics = held_out_metrics(sums, held_out.num_bytes)
        return {
            "perplexity": perplexity(metrics["val_loss"]),
            "bits_per_byte": metrics["val_bits_per_byte"],
            "loss": metrics["val_loss"],
            "tokens": round(sums["weight"]),
        }

    def describe_data(self, config: LmConfig, data: LmData) -> str:
        counts = ", ".join(
            f"{len(corpus.tokens):,} tokens {split}" if len(corpus.tokens) else f"{split} as it is read"
            for split, corpus in data.corpora.items()
        )
        return f"{config.data.data} as {data.tokenizer.description}, {counts}"

    def next_commands(self, config: LmConfig, data: LmData) -> Sequence[Sequence[str]]:
        workdir = ("--workdir", config.loop.workdir)
        prompt = next(text for text in self._prompts(config, data) if _encodes(data.tokenizer, text))
        return ("eval.lm", *workdir), ("eval.generate", *workdir, "--prompt", prompt)

    def _prompts(self, config: LmConfig, data: LmData) -> Iterator[str]:
        """Texts to continue, the best first; a vocabulary of words may lack its words."""
        yield from (config.sample_prompt, "def " if config.data.data == "stdlib" else "The ")
        assert data.prompt is not None
        yield from (data.tokenizer.decode(data.prompt[:end]) for end in range(1, len(data.prompt) + 1))

    def finish(self, config: LmConfig, data: LmData, model: DecoderLM, params: Any, mesh: Mesh) -> None:
        """Prints a prompt and what the model adds to it."""
        if not config.sample_tokens:
            return
        assert data.prompt is not None
        length = len(data.prompt) + config.sample_tokens
        try:
            jax.eval_shape(lambda: model.init_cache(1, length))
        except ValueError as error:  # a mechanism has a largest length
            log(f"no sample of {config.sample_tokens} tokens: {error}")
            return
        with jax.set_mesh(mesh):
            tokens = generate(
                model,
                {"params": params},
                jnp.asarray(data.prompt, jnp.int32)[None],
                max_new_tokens=config.sample_tokens,
                rng=jax.random.key(config.loop.seed),
                temperature=_SAMPLE_TEMPERATURE,
            )
        if is_lead():
            added = np.asarray(tokens.addressable_data(0)[0])[len(data.prompt) :]
            text = continuation(data.tokenizer, data.prompt, added)
            print(f"{data.tokenizer.decode(data.prompt)}\n--- what the network adds:\n{text}")


def _tokenizer_of_run(config: LmConfig) -> Tokenizer | None:
    """The tokenizer of the run that a run is converted from; None for another start, or if it is gone."""
    folder = epath.Path(config.convert_from)
    is_run = bool(config.convert_from) and (folder / "checkpoints").exists()
    return load_tokenizer(folder) if is_run else None


def _encodes(tokenizer: Tokenizer, text: str) -> bool:
    """Whether a text is at least one token of the vocabulary."""
    try:
        return len(tokenizer.encode(text)) > 0
    except UserError:
        return False


def _sample_prompt(config: LmConfig, tokenizer: Tokenizer, held_out: Corpus) -> Int[np.ndarray, " P"]:
    """The tokens that the sample continues."""
    if not config.sample_prompt:
        return np.asarray(held_out.tokens[:_SAMPLE_CONTEXT], np.int32)
    return encode_given(tokenizer, config.sample_prompt, "--sample_prompt")


class LmMatching(Matching, LmTask):
    """See `train.tasks.conversion`."""

    name = "lm-matching"


LM, LM_MATCHING = LmTask(), LmMatching()
