"""Pretraining on the Long Range Arena's own inputs: an encoder that predicts masked tokens of a task's sequences.

`python -m train.lra denoise-TASK` trains it without the labels, and `python -m train.lra TASK --pretrained RUN` trains
the classifier from its weights: self-pretraining, Amos et al. 2023 (arXiv:2310.02980), here with the masks of
arXiv:1810.04805.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from brl_jax.fields import Range
from brl_jax.models import MaskedLM
from train.data.lra.tasks import LRA_TASKS
from train.data.masking import MaskedBatches, MaskedHeldOut
from train.engine.batch import HeldOut
from train.engine.fields import Decided, Flat
from train.engine.step import Objective
from train.tasks.lra_config import PRESETS, LraModelConfig, TaskDataConfig, for_rows, recast
from train.tasks.lra_data import ArenaTask, LraData, changed_options
from train.tasks.mlm import masked_measures, masked_shapes, mlm_objective
from train.tasks.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class DenoiseDataConfig(TaskDataConfig):
    """The examples, and how much of them is masked."""

    mask_share: Annotated[float, Range(above=0, below=1)] = 0.5
    """Share of a sequence's tokens that the network must predict."""


@dataclasses.dataclass(frozen=True)
class DenoiseModelConfig(LraModelConfig):
    """The network."""

    inputs: Decided[str] = "embed"  # type: ignore[assignment]
    pooling: Decided[str] = "mean"  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class DenoiseConfig(RunConfig):
    """An encoder trained to predict masked tokens of one task's sequences."""

    data: Annotated[DenoiseDataConfig, Flat]
    model: Annotated[DenoiseModelConfig, Flat]


def _preset(task: str) -> DenoiseConfig:
    """The task's own preset, with another objective."""
    found = PRESETS[task]
    model = recast(DenoiseModelConfig, found.model, inputs="embed", pooling="mean")
    return DenoiseConfig(found.loop, recast(DenoiseDataConfig, found.data), model, found.optimizer)


PRETRAINING = {f"denoise-{task}": _preset(task) for task in LRA_TASKS if not LRA_TASKS[task].is_pair}


class LraDenoiseTask(ArenaTask[DenoiseConfig]):
    """Masked tokens of the sequences of one task, whose labels are not read."""

    name = "lra_denoise"
    about = "Trains an encoder to predict masked tokens of the Long Range Arena's sequences."
    config_class = DenoiseConfig
    presets = PRETRAINING
    default_preset = "denoise-listops"
    network = MaskedLM

    def sized(self, config: DenoiseConfig, data: LraData | None = None) -> DenoiseConfig:
        """Sets the tokens, those of the arena's task and the mask."""
        sizes = LRA_TASKS[config.data.task]
        model = for_rows(
            config.data, config.model, vocab_size=sizes.vocab_size + 1, num_classes=sizes.num_classes
        )
        return dataclasses.replace(config, model=model)

    def objective(self, model: MaskedLM, config: DenoiseConfig) -> Objective:
        return mlm_objective(model, config.z_loss)

    def batch_shapes(self, config: DenoiseConfig, rows: int) -> dict[str, Any]:
        return masked_shapes(rows, config.data.padded_lengths[-1], config.data.mask_share)

    def _masking(self, config: DenoiseConfig) -> dict[str, Any]:
        size = LRA_TASKS[config.data.task].vocab_size
        return {"vocab_size": size, "mask": size, "share": config.data.mask_share}

    def training_batches(self, config: DenoiseConfig, data: LraData, **options: Any) -> MaskedBatches:
        batches = super().training_batches(config, data, **options)
        return MaskedBatches(batches, **options, **self._masking(config))

    def held_out_batches(
        self, config: DenoiseConfig, data: LraData, split: str, **options: Any
    ) -> MaskedHeldOut:
        batches = super().held_out_batches(config, data, split, **options)
        return MaskedHeldOut(batches, rows=options["rows"], **self._masking(config))

    def measures(
        self, config: DenoiseConfig, data: LraData, split: str, held_out: HeldOut, sums: Mapping[str, float]
    ) -> dict[str, Any]:
        return masked_measures(sums)

    def next_commands(self, config: DenoiseConfig, data: LraData) -> Sequence[Sequence[str]]:
        network = changed_options(PRESETS[config.data.task], config)
        inputs = ("--inputs", config.model.inputs)
        return (("train.lra", config.data.task, "--pretrained", config.loop.workdir, *inputs, *network),)


LRA_DENOISE = LraDenoiseTask()
