"""The task of `python -m train.glue`: a masked language model's encoder, fine-tuned to classify sentences and pairs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array

from brl_jax.models import Classifier, EncoderConfig
from train.data.bucketed import EvalBatches, TrainBatches, default_buckets
from train.data.examples import Examples
from train.data.glue import GLUE_TASKS, LARGEST_SCORE, SCORE_STEPS, GlueDataConfig, load_glue
from train.data.tokenizers.named import load_tokenizer
from train.engine.batch import Arrays
from train.engine.config import LoopConfig
from train.engine.errors import UserError
from train.engine.fields import Decided, Flat, Needed
from train.engine.optimizer import OptimizerConfig
from train.engine.step import Objective, classification, outputs, softmax_loss, weighted_sums
from train.tasks.mlm import MLM, SEPARATOR, SPECIAL
from train.tasks.pretrained_weights import pretrained_run, pretrained_weights, replaced
from train.tasks.run_config import RunConfig
from train.tasks.task import TOKEN, Task, objective_of, shapes


@dataclasses.dataclass(frozen=True)
class GlueConfig(RunConfig):
    """An encoder that is fine-tuned on a task of GLUE."""

    data: Annotated[GlueDataConfig, Flat]
    model: Decided[EncoderConfig]
    pretrained: Needed[str] = ""
    """Folder of the run of train.mlm whose network, tokenizer and weights are used."""
    checkpoint: str = "best"
    """Of that run: best (lowest held-out loss), last, or a step."""
    from_scratch: bool = False
    """Take its network and tokenizer, but not its weights: what pretraining is compared with."""
    dropout: float = 0.1
    """Dropout rate while fine-tuning."""

    def without_effect(self) -> dict[str, str]:
        return {"checkpoint": "with from_scratch True"} if self.from_scratch else {}


GlueData = Mapping[str, Examples]
"""The examples of some splits."""


def _preset(task: str) -> GlueConfig:
    """Three passes with one of the four learning rates of TransNormer (arXiv:2210.10340, section 5.1); the batch is
    our choice. A tenth of the training examples is held out."""
    steps = 3 * (GLUE_TASKS[task].examples * 9 // 10 // 32)
    every = max(1, steps // 6)
    return GlueConfig(
        loop=LoopConfig(steps=steps, batch=32, eval_every=every, checkpoint_every=every, keep_checkpoints=1),
        data=GlueDataConfig(task=task),
        model=EncoderConfig(),
        optimizer=OptimizerConfig(
            learning_rate=1e-4,
            warmup_steps=max(1, steps // 16),
            decay="linear",
            final_share=0.0,
            beta2=0.98,
            weight_decay=0.01,
        ),
    )


PRESETS: dict[str, GlueConfig] = {task: _preset(task) for task in GLUE_TASKS}


def scores(logits: Any) -> Any:
    """Scores of 0 to 5 from logits (..., 2): the second one's probability, times 5."""
    return LARGEST_SCORE * jax.nn.softmax(logits, axis=-1)[..., 1]


def glue_objective(
    model: Classifier, task: str, z_loss: float = 0.0, start: Any = lambda params: params
) -> Objective:
    """Cross-entropy of the classes, and accuracy. For scores: of the second of two classes with the score over 5 as its
    probability, and the negative squared error of the score instead of the accuracy."""
    classes = GLUE_TASKS[task].classes

    def loss(params: Any, memory: Any, batch: Arrays, key: Array | None):
        logits = outputs(model, params, key, batch["tokens"], lengths=batch["lengths"])
        targets = batch["targets"]
        if classes:
            (nll, good), name = classification(logits, targets, key, z_loss), "accuracy"
        else:
            score = targets.astype(jnp.float32) / SCORE_STEPS
            share = score / LARGEST_SCORE
            shares = jnp.stack([1.0 - share, share], axis=-1)
            nll = softmax_loss(optax.softmax_cross_entropy(logits, shares), logits, key, z_loss)
            good, name = -jnp.square(scores(logits) - score), "negative_squared_error"
        return weighted_sums(nll, batch["weights"], memory, **{name: good})

    best = "accuracy" if classes else "negative_squared_error"
    return objective_of(model, [TOKEN], loss, averages=(best,), best=best, start=start)


class GlueTaskOfRuns(Task[GlueConfig, GlueData]):
    """Fine-tuning on one task of GLUE."""

    name = "glue"
    about = "Fine-tunes a masked language model's encoder on a task of GLUE."
    config_class = GlueConfig
    presets = PRESETS
    default_preset = "cola"
    network = Classifier
    following = ("eval.glue --workdir {run}",)

    def _pretrained(self, config: GlueConfig) -> Any:
        """The configuration of the masked language model."""
        return pretrained_run([MLM], config.pretrained)[1]

    def sized(self, config: GlueConfig, data: GlueData | None = None) -> GlueConfig:
        """The network of the masked language model, with the task's classes; without one, as when a run is
        planned, the network of the configuration."""
        classes = max(2, len(GLUE_TASKS[config.data.task].classes))
        if not config.pretrained:
            return config.changed(model={"num_classes": classes})
        found = self._pretrained(config).model
        if config.data.length > found.max_length and found.positions == "learned":
            raise UserError(
                f"--length: the network of {config.pretrained} has positions for {found.max_length} tokens, "
                f"got {config.data.length}"
            )
        fields = {field.name: getattr(found, field.name) for field in dataclasses.fields(EncoderConfig)}
        max_length = found.max_length if found.positions == "learned" else config.data.length
        fields |= {"max_length": max_length, "dropout": config.dropout, "num_classes": classes}
        # A row is read alike in every bucket that it may be padded to.
        model = EncoderConfig(**fields).for_training(config.data.length)
        return dataclasses.replace(config, model=model)

    def objective(self, model: Classifier, config: GlueConfig) -> Objective:
        def start(params: Any) -> Any:
            if config.from_scratch:
                return params
            found = self._pretrained(config)
            read = pretrained_weights(MLM, found, config.pretrained, config.checkpoint)
            return {**params, "encoder": replaced(params["encoder"], read["encoder"])}

        return glue_objective(model, config.data.task, config.z_loss, start)

    def batch_shapes(self, config: GlueConfig, rows: int) -> dict[str, Any]:
        integers = {"tokens": (rows, config.data.length), "lengths": (rows,), "targets": (rows,)}
        return shapes(integers, {"weights": (rows,)})

    def load(self, config: GlueConfig, splits: Sequence[str]) -> GlueData:
        if not config.pretrained:
            raise UserError("--pretrained: expected the folder of a run of train.mlm, got none")
        tokenizer = load_tokenizer(config.pretrained)
        separator = config.model.vocab_size - SPECIAL + SEPARATOR
        if tokenizer.vocab_size != config.model.vocab_size - SPECIAL:
            raise UserError(
                f"--pretrained: the network of {config.pretrained} has {config.model.vocab_size - SPECIAL} tokens, "
                f"its tokenizer {tokenizer.vocab_size}"
            )
        return load_glue(config.data, tokenizer, separator, splits)

    def describe_data(self, config: GlueConfig, data: GlueData) -> str:
        counts = ", ".join(f"{len(examples):,} examples {split}" for split, examples in data.items())
        return f"{config.data.task} of GLUE, {config.data.data_dir}, {counts}"

    def training_batches(self, config: GlueConfig, data: GlueData, **options: Any) -> TrainBatches:
        buckets = default_buckets(config.data.length)
        return TrainBatches(data["train"], buckets=buckets, **options)

    def held_out_batches(self, config: GlueConfig, data: GlueData, split: str, **options: Any) -> EvalBatches:
        return EvalBatches(data[split], buckets=default_buckets(config.data.length), **options)

    def predict(
        self, config: GlueConfig, model: Classifier, params: Any, data: GlueData, split: str
    ) -> tuple[np.ndarray, np.ndarray]:
        """The predicted and the true classes (or scores, 0 to 5) of a split's examples, in one order."""
        classes = GLUE_TASKS[config.data.task].classes

        @jax.jit
        def run(params: Any, tokens: Any, lengths: Any) -> Any:
            logits: Any = model.apply({"params": params}, tokens, lengths=lengths)
            return logits.argmax(-1) if classes else scores(logits)

        predicted, true = self.predictions(
            config, data, split, lambda batch: run(params, batch["tokens"], batch["lengths"])
        )
        return predicted, true if classes else true / SCORE_STEPS


GLUE = GlueTaskOfRuns()
