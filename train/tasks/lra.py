"""The task of `python -m train.lra`: an encoder that classifies the sequences of the Long Range Arena."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from brl_jax.models import Classifier, EncoderConfig, PairClassifier
from train.data.bucketed import EvalBatches
from train.data.lra.tasks import LRA_TASKS
from train.engine.batch import Arrays, HeldOut
from train.engine.errors import UserError
from train.engine.metrics import log
from train.engine.step import Objective, means, outputs
from train.tasks.lra_config import PRESETS, LraConfig, for_rows
from train.tasks.lra_data import ArenaTask, LraData
from train.tasks.lra_denoise import LRA_DENOISE
from train.tasks.lra_head import fitted_head
from train.tasks.lra_trace import LRA_TRACE
from train.tasks.pretrained_weights import pretrained_run, pretrained_weights, replaced
from train.tasks.task import TOKEN, Task, classifier_objective, shapes

# Fields of the network that may differ from the run that it starts from: they change no parameter of the
# encoder, or the task decides them.
_OWN = ("dropout", "remat", "dtype", "implementation", "pooling", "vocab_size", "num_classes", "max_length")


def lra_objective(
    model: Classifier | PairClassifier,
    z_loss: float = 0.0,
    start: Callable[[Any], Any] = lambda params: params,
) -> Objective:
    """Classification of {"tokens": (B, [2,] T), "lengths": (B, [2]), "targets": (B,)} int32, "weights": (B,) floats.

    `start`: see `Objective`.
    """

    def logits(params: Any, batch: Arrays, key: Array | None) -> Array:
        return outputs(model, params, key, batch["tokens"], lengths=batch["lengths"])

    tokens = np.zeros((1, 2, 1), np.int32) if isinstance(model, PairClassifier) else TOKEN
    return classifier_objective(model, [tokens], logits, z_loss, best="accuracy", start=start)


class LraTask(ArenaTask[LraConfig]):
    """Classification of whole sequences, or of pairs of them."""

    name = "lra"
    about = "Trains a classifier on the Long Range Arena."
    config_class = LraConfig
    presets = PRESETS
    default_preset = "listops"
    following = ("eval.lra --workdir {run}", "eval.lra --table {run}")

    def sized(self, config: LraConfig, data: LraData | None = None) -> LraConfig:
        """Sets the tokens and classes of the arena's task. A run that this one starts from may have a mask as well."""
        sizes = LRA_TASKS[config.data.task]
        model = for_rows(
            config.data, config.model, vocab_size=sizes.vocab_size, num_classes=sizes.num_classes
        )
        config = dataclasses.replace(config, model=model)
        if config.pretrained:
            _, found = self._pretrained(config)
            config = config.changed(model={"vocab_size": found.model.vocab_size})
        return config

    def _pretrained(self, config: LraConfig) -> tuple[Task[Any, Any], Any]:
        """The task and the configuration of the run that this one starts from."""
        task, found = pretrained_run([self, LRA_DENOISE, LRA_TRACE], config.pretrained)
        has_table = "learned" in (found.model.positions, config.model.positions)
        for name in (field.name for field in dataclasses.fields(EncoderConfig)):
            theirs, ours = getattr(found.model, name), getattr(config.model, name)
            if theirs != ours and name not in _OWN:
                raise UserError(
                    f"--pretrained: expected the network of {config.pretrained}, which has {name}={theirs}, got {ours}"
                )
        length = config.data.padded_lengths[-1]
        if has_table and found.model.max_length != length:
            raise UserError(
                f"--pretrained: expected the {found.model.max_length} learned positions of {config.pretrained}, "
                f"got {length}"
            )
        return task, found

    def model(self, config: LraConfig) -> Classifier | PairClassifier:
        return (PairClassifier if LRA_TASKS[config.data.task].is_pair else Classifier)(config.model)

    def objective(self, model: Classifier | PairClassifier, config: LraConfig) -> Objective:
        def start(params: Any) -> Any:
            if config.pretrained:
                params = self._from_pretrained(params, config)
            if config.fit_head:
                params = {**params, "head": replaced(params["head"], self._head(model, params, config))}
            return params

        return lra_objective(model, config.z_loss, start)

    def _from_pretrained(self, params: Any, config: LraConfig) -> Any:
        """The parameters with the encoder of the run that this one starts from, and its head for the same task."""
        task, found = self._pretrained(config)
        read = pretrained_weights(task, found, config.pretrained, config.checkpoint)
        # Only a classifier has the token in front of a row ("cls" pooling), and a head is for its own task alone.
        own = params["encoder"]
        shared = {name: replaced(own[name], read["encoder"][name]) for name in own if name in read["encoder"]}
        params = {**params, "encoder": {**own, **shared}}
        if task is self and found.data.task == config.data.task:
            params["head"] = replaced(params["head"], read["head"])
        return params

    def _head(self, model: Any, params: Any, config: LraConfig) -> Mapping[str, Any]:
        """The head that starts as the linear map fitted to the first training examples."""
        if jax.process_count() > 1:
            raise UserError(
                f"--fit_head: expected 0 with {jax.process_count()} processes, got {config.fit_head}"
            )
        examples = self.load(config, ("train",)).examples["train"]
        batches = EvalBatches(
            examples, batch=config.loop.batch, buckets=config.data.padded_lengths, limit=config.fit_head
        )
        log(f"fitting the head to {min(config.fit_head, len(examples)):,} training examples")
        try:
            return fitted_head(model, params, batches)
        except ValueError as error:
            raise UserError(f"--fit_head: {error}") from error

    def batch_shapes(self, config: LraConfig, rows: int) -> dict[str, Any]:
        sequences = (rows, 2) if LRA_TASKS[config.data.task].is_pair else (rows,)
        tokens = (*sequences, config.data.padded_lengths[-1])
        return shapes({"tokens": tokens, "lengths": sequences, "targets": (rows,)}, {"weights": (rows,)})

    def measures(
        self, config: LraConfig, data: LraData, split: str, held_out: HeldOut, sums: Mapping[str, float]
    ) -> dict[str, Any]:
        """Accuracy with its standard error; chance, the accuracy of always answering the most frequent class; by how
        many standard errors the first exceeds the second; the balance of the classes; the loss."""
        metrics = means(sums)
        examples = data.examples[split]
        count = len(examples)
        balance = np.bincount(examples.labels, minlength=config.model.num_classes) / count
        accuracy, chance = metrics["accuracy"], float(balance.max())
        error = math.sqrt(accuracy * (1 - accuracy) / count)
        return {
            "accuracy": accuracy,
            "standard_error": error,
            "chance": chance,
            "errors_above_chance": (accuracy - chance) / error if error else None,
            "class_balance": balance.round(4).tolist(),
            "examples": count,
            "loss": metrics["loss"],
        }


LRA = LraTask()
