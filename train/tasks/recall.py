"""The task of `python -m train.recall`: a decoder that answers questions about records far back in its row."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.layers import (
    BRLConfig,
    DeltaNetConfig,
    FullConfig,
    GatedDeltaNet2Config,
    GatedDeltaNetConfig,
    GLAConfig,
    KDAConfig,
    LocalConfig,
    Mamba2Config,
    Mechanism,
    NativeSparseConfig,
    RetNetConfig,
    RWKV7Config,
)
from brl_jax.models import DecoderConfig, DecoderLM
from train.data.drawn import HeldOutDrawn
from train.data.recall import (
    Case,
    Kind,
    RecallDataConfig,
    blind_accuracy,
    num_answers,
)
from train.engine.batch import Arrays
from train.engine.config import LoopConfig
from train.engine.errors import UserError
from train.engine.evaluation import evaluate
from train.engine.fields import Decided, Flat
from train.engine.optimizer import OptimizerConfig
from train.engine.step import Objective, make_eval_step, means, outputs
from train.tasks.conversion import ConvertibleConfig, Matching, convert_onto, matching_config
from train.tasks.drawn import DrawnTask
from train.tasks.task import TOKEN, classifier_objective, shapes


@dataclasses.dataclass(frozen=True)
class RecallModelConfig(DecoderConfig):
    """The network."""

    vocab_size: Decided[int] = 256
    lora_rank: Decided[int] = 0
    lora_alpha: Decided[float] = 16.0


@dataclasses.dataclass(frozen=True)
class RecallConfig(ConvertibleConfig):
    """A decoder trained to recall records."""

    task: ClassVar[str] = "recall"

    data: Annotated[RecallDataConfig, Flat]
    model: Annotated[RecallModelConfig, Flat]


def _small(
    mechanism: Mechanism,
    kind: Kind = "mqar",
    pairs: tuple[int, ...] = (1, 2, 4, 8),
    vocabulary: int = 64,
    steps: int = 2400,
) -> RecallConfig:
    """One to four minutes on two CPU cores. Two layers of window 8 reach 14 tokens, fewer than the gap.

    Rows with few records come in turn with rows of many: a network that has to find out at once which token is a key,
    how to keep it and how to ask for it learns from the former what it does not from the latter alone.
    """
    return RecallConfig(
        loop=LoopConfig(steps=steps, batch=32, eval_every=50, checkpoint_every=400, keep_checkpoints=1),
        data=RecallDataConfig(kind=kind, vocabulary=vocabulary, length=(64,), pairs=pairs, gap=16),
        model=RecallModelConfig(num_layers=2, d_model=64, num_heads=4, d_ff=128, mechanism=mechanism),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=50, weight_decay=0.0),
    )


def _hybrid(mechanism: Mechanism, other: Mechanism) -> RecallConfig:
    """`_small` with a layer of another mechanism after every layer of the first; with `--num_layers 4 --early_layers 3`
    after every three."""
    return _small(mechanism).changed(model={"late_mechanism": other, "schedule": "alternate"})


def _zoology(mechanism: Mechanism) -> RecallConfig:
    """The lengths, pairs and vocabulary of Zoology's section 4 (arXiv:2312.04927); batch and steps are our choice."""
    return RecallConfig(
        loop=LoopConfig(steps=20_000, batch=256, eval_every=1_000, checkpoint_every=1_000),
        data=RecallDataConfig(vocabulary=8192, length=(64, 128, 256, 256, 256), pairs=(4, 8, 16, 32, 64)),
        model=RecallModelConfig(num_layers=2, d_model=128, num_heads=4, d_ff=256, mechanism=mechanism),
        optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=1_000),
    )


_LOCAL = LocalConfig(window=8)
_BRL = BRLConfig(window=8, num_compressed=16, block_size=16, history_size=64, memory="layer")
# The paper's algorithm.
_BRL_OUTPUT = dataclasses.replace(_BRL, memory="output", beta=0.5)
# B and C have a head's features; with Mamba-2's 128 the state would be larger than the row's keys.
_MAMBA2 = Mamba2Config(state_size=16)
_NATIVE_SPARSE = NativeSparseConfig(window=8, compressed_size=4, stride=2, selected_size=4, num_selected=6)

PRESETS: dict[str, RecallConfig] = {
    "brl": _small(_BRL),
    "brl-output": _small(_BRL_OUTPUT),
    "local": _small(_LOCAL),
    "full": _small(FullConfig()),
    "deltanet": _small(DeltaNetConfig()),
    "gated_deltanet": _small(GatedDeltaNetConfig()),
    "kda": _small(KDAConfig()),
    "gated_deltanet_2": _small(GatedDeltaNet2Config()),
    "rwkv7": _small(RWKV7Config()),
    "retnet": _small(RetNetConfig()),
    "gla": _small(GLAConfig()),
    "mamba2": _small(_MAMBA2),
    "native_sparse": _small(_NATIVE_SPARSE),
    "local-full": _hybrid(_LOCAL, FullConfig()),
    "gla-full": _hybrid(GLAConfig(), FullConfig()),
    "mamba2-full": _hybrid(_MAMBA2, FullConfig()),
    "gated_deltanet-full": _hybrid(GatedDeltaNetConfig(), FullConfig()),
    "gated_deltanet-brl": _hybrid(GatedDeltaNetConfig(), _BRL),
    "induction": _small(_BRL, kind="induction", pairs=(4,), steps=800),
    "copy": _small(_BRL, kind="copy", pairs=(8,), vocabulary=18, steps=800),
    "zoology-full": _zoology(FullConfig()),
    "zoology-brl": _zoology(dataclasses.replace(_BRL, num_compressed=64, history_size=256)),
}


def answer_logits(model: DecoderLM, params: Any, batch: Arrays, key: Array | None) -> Float[Array, "B P V"]:
    """The logits at a batch's questions, in float32; other places are not computed."""
    hidden, *_ = outputs(model, params, key, batch["tokens"], method="hidden")
    asked = jnp.take_along_axis(hidden, batch["places"][..., None], axis=1)
    logits: Any = model.apply({"params": params}, asked, method="logits")
    return logits


def recall_objective(model: DecoderLM, z_loss: float = 0.0) -> Objective:
    """Cross-entropy and accuracy at the questions of what `train.data.recall.draw_rows` returns; no memory passes from
    row to row."""
    return classifier_objective(model, [TOKEN], functools.partial(answer_logits, model), z_loss)


class RecallTask(DrawnTask[RecallConfig]):
    """Recall."""

    name = "recall"
    about = "Trains a decoder to recall records from far back."
    config_class = RecallConfig
    presets = PRESETS
    default_preset = "brl"
    network = DecoderLM
    following = ("eval.recall --workdir {run}", "eval.recall --table {run} --picture {run}/recall.png")

    def sized(self, config: RecallConfig, data: None = None) -> RecallConfig:
        """Sets the vocabulary from the rows, and fixes what follows the length at theirs."""
        length, _ = max(config.data.cases)
        model = dataclasses.replace(config.model.for_training(length), vocab_size=config.data.vocabulary)
        if config.convert_from and config.model.vocab_size != config.data.vocabulary:
            raise UserError(
                f"--vocabulary: expected the {config.model.vocab_size} tokens of {config.convert_from}, got "
                f"{config.data.vocabulary}"
            )
        return dataclasses.replace(config, model=model)

    def objective(self, model: DecoderLM, config: RecallConfig) -> Objective:
        objective = recall_objective(model, config.z_loss)
        if not config.convert_from:
            return objective
        return dataclasses.replace(objective, start=functools.partial(convert_onto, config))

    def before(self, config: RecallConfig) -> tuple[RecallTask, RecallConfig] | None:
        matching = matching_config(config)
        return None if matching is None else (RECALL_MATCHING, matching)

    def batch_shapes(self, config: RecallConfig, rows: int) -> dict[str, Any]:
        length, pairs = max(config.data.cases)
        answers = (rows, pairs)
        return shapes({"tokens": (rows, length), "places": answers, "targets": answers}, {"weights": answers})

    def describe_data(self, config: RecallConfig, data: None) -> str:
        records: dict[int, list[str]] = {}
        for length, pairs in dict.fromkeys(config.data.cases):
            records.setdefault(length, []).append(str(pairs))
        rows = "; ".join(
            f"{length} tokens with {', '.join(pairs)} records" for length, pairs in records.items()
        )
        return f"{config.data.kind}, drawn while training: rows of {rows}"

    def measure(
        self, config: RecallConfig, model: DecoderLM, params: Any, data: None, split: str
    ) -> dict[str, Any]:
        """The loss and the accuracy for each of the configuration's lengths and numbers of records."""
        cases = tuple(dict.fromkeys(config.data.cases))
        return {"cases": self.measure_cases(config, model, params, split, cases)}

    def measure_cases(
        self, config: RecallConfig, model: DecoderLM, params: Any, split: str, cases: Sequence[Case]
    ) -> list[dict[str, Any]]:
        """The loss and the accuracy for each of some cases, and what guessing gives: any answer that is possible
        ("chance"), or the row's most frequent one ("guess_in_row", `train.data.recall.blind_accuracy`)."""
        objective = self.objective(model, config)
        eval_step = jax.jit(make_eval_step(objective))
        measured = []
        for case in cases:
            rows = HeldOutDrawn(config.data, batch=config.loop.microbatch, split=split, cases=[case])
            sums = evaluate(eval_step, objective, params, rows)
            assert sums is not None
            measured.append(
                {
                    **case._asdict(),
                    **means(sums),
                    "answers": round(sums["weight"]),
                    "chance": 1 / num_answers(config.data, case.pairs),
                    "guess_in_row": blind_accuracy(config.data, case.pairs),
                }
            )
        return measured


class RecallMatching(Matching, RecallTask):
    """See `train.tasks.conversion`."""

    name = "recall-matching"


RECALL, RECALL_MATCHING = RecallTask(), RecallMatching()
