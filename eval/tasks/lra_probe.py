"""What a linear map reads from a trained encoder on the Long Range Arena: python -m eval.lra_probe --workdir RUN.

RUN is of train.lra: a classifier, denoise-TASK or trace-pathfinder. Ridge regression on the first training examples
fits one linear function for each class to the mean of the encoder's outputs over a sequence; the largest one is the
answer. Prints the accuracy on the test split, its standard error and chance.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

from brl_jax.fields import Natural
from brl_jax.models import Encoder
from eval.harness.main import Evaluation
from eval.harness.options import RunOptions
from eval.harness.runs import Run, run_facts
from train.data.bucketed import EvalBatches
from train.data.examples import Examples
from train.data.lra.tasks import LRA_TASKS
from train.engine.errors import UserError
from train.tasks.lra import LRA
from train.tasks.lra_denoise import LRA_DENOISE
from train.tasks.lra_head import fitted, read_features
from train.tasks.lra_trace import LRA_TRACE

# Training examples that the linear map is fitted to.
_FITTED = 2000


@dataclasses.dataclass(frozen=True)
class ProbeOptions(RunOptions):
    """What to measure."""

    test_examples: Natural = 0
    """Test examples; 0: the run's."""


def pooled(run: Run, examples: Examples, limit: int) -> tuple[np.ndarray, np.ndarray]:
    """The mean of the encoder's outputs for the first `limit` examples (0: all), and their labels."""
    encoder = Encoder(run.config.model)

    @jax.jit
    def mean(tokens: Any, lengths: Any) -> Any:
        if tokens.ndim == 3:  # the marks of trace-pathfinder are a second sequence
            tokens, lengths = tokens[:, 0], lengths[:, 0]
        outputs: Any = encoder.apply({"params": run.params["encoder"]}, tokens, lengths=lengths)
        inside = (jax.numpy.arange(tokens.shape[1]) < lengths[:, None])[..., None]
        return jax.numpy.where(inside, outputs, 0.0).sum(1) / lengths[:, None]

    batches = EvalBatches(examples, batch=50, buckets=run.config.data.padded_lengths, limit=limit)
    return read_features(mean, batches)


def measure(run: Run, options: ProbeOptions) -> dict[str, Any]:
    """The accuracy of the linear map, and facts about the run."""
    data_config = run.config.data
    sizes = LRA_TASKS[data_config.task]
    if sizes.is_pair:
        raise UserError(f"--workdir: expected a task of single sequences, got {data_config.task}")
    if options.test_examples:
        data_config = dataclasses.replace(data_config, test_examples=options.test_examples)
    data = run.task.load(dataclasses.replace(run.config, data=data_config), ("train", "test"))
    linear = fitted(*pooled(run, data.examples["train"], _FITTED), sizes.num_classes)
    features, labels = pooled(run, data.examples["test"], 0)
    accuracy = float((linear(features).argmax(-1) == labels).mean())
    return {
        "task": data_config.task,
        "accuracy": accuracy,
        "standard_error": math.sqrt(accuracy * (1 - accuracy) / len(labels)),
        "chance": float(np.bincount(labels).max() / len(labels)),
        "examples": len(labels),
        "fitted_to": min(_FITTED, len(data.examples["train"])),
        "data": data.source.name,
        **run_facts(run),
    }


main = Evaluation(
    [LRA, LRA_DENOISE, LRA_TRACE],
    ProbeOptions(),
    "eval.lra_probe",
    "Reads a trained encoder by a linear map.",
    measure,
).main
