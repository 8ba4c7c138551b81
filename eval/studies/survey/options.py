"""The options of eval.survey, and the configuration of each of its runs."""

from __future__ import annotations

import dataclasses
from typing import Literal, NamedTuple

from brl_jax.fields import Checked, Count, Rows, Seed, Steps
from brl_jax.layers import BRLConfig
from eval.speed.networks import network, network_names
from train.engine.errors import UserError
from train.tasks.lra import LRA
from train.tasks.lra_config import PRESETS, LraConfig

SurveyTask = Literal["listops", "text", "image"]


class Size(NamedTuple):
    """How much of a task a survey uses."""

    steps: int
    batch: int
    valid_examples: int
    test_examples: int


# Some hundred runs in a few hours on one CPU core.
SIZES: dict[SurveyTask, Size] = {
    "listops": Size(steps=300, batch=16, valid_examples=200, test_examples=1000),
    "text": Size(steps=200, batch=8, valid_examples=100, test_examples=1000),
    "image": Size(steps=200, batch=4, valid_examples=100, test_examples=500),
}

# The window, and the number of compressed tokens, in the tasks' bare presets, which have BRL.
_PRESET_WINDOWS = {
    task: mechanism.window
    for task in SIZES
    if isinstance(mechanism := PRESETS[task].model.mechanism, BRLConfig)
}


@dataclasses.dataclass(frozen=True)
class SurveyOptions(Checked):
    """What to train and where."""

    folder: str = "runs/survey"
    """Folder of the survey: its runs, in TASK/MECHANISM/SEED, their data, and the times."""
    tasks: tuple[SurveyTask, ...] = tuple(SIZES)
    """Tasks of the Long Range Arena, at the size of their bare presets."""
    mechanisms: tuple[str, ...] = network_names()
    """Mechanisms that have a bidirectional form; no_mixing is the control."""
    seeds: tuple[Seed, ...] = (0, 1, 2)
    """Seeds of the runs of each mechanism."""
    text_dir: str | None = None
    """Folder of the task text, as for train.lra --data_dir."""
    image_dir: str | None = None
    """Folder of the task image, as for train.lra --data_dir."""
    steps: Steps | None = None
    """Training steps of each run; by default the survey's for each task."""
    batch: Rows | None = None
    """Rows of a step; by default the survey's for each task."""
    train_examples: Count | None = None
    """Training examples; by default the preset's."""
    test_examples: Count | None = None
    """Test examples; by default the survey's for each task."""
    repeats: Count = 5
    """Rounds of timing; the fastest counts."""
    picture: str | None = None
    """A .png file to draw: accuracy against speed, the area of a bubble showing the memory."""

    def __post_init__(self):
        known = {"tasks": tuple(SIZES), "mechanisms": network_names()}
        for name, values in known.items():
            chosen = getattr(self, name)
            if not chosen or not set(chosen) <= set(values) or len(set(chosen)) < len(chosen):
                raise ValueError(
                    f"{name} must be some of {', '.join(values)}, each once, got {', '.join(chosen) or 'none'}"
                )
        if not self.seeds or len(set(self.seeds)) < len(self.seeds):
            raise ValueError(f"seeds must be one or more different numbers, got {self.seeds}")
        if not self.folder or "://" in self.folder:
            raise ValueError(f"folder must be a local folder, got {self.folder!r}")

    def without_effect(self) -> dict[str, str]:
        """See `train.cli.options.parse_options`."""
        return {
            f"{task}_dir": f"without the task {task}" for task in ("text", "image") if task not in self.tasks
        }


class SurveyRun(NamedTuple):
    """A run of the survey: the names of its task and network, and its configuration."""

    task: SurveyTask
    name: str
    config: LraConfig


def survey_run(options: SurveyOptions, task: SurveyTask, name: str, seed: int) -> SurveyRun:
    """The run of a network on a task.

    It is the task's bare preset with another mechanism and one length for all batches. Windows and numbers of
    compressed tokens are the same as in the preset; the warm-up is a tenth of the steps."""
    preset, size = PRESETS[task], SIZES[task]
    steps = options.steps or size.steps
    loop = dataclasses.replace(
        preset.loop,
        workdir=f"{options.folder}/{task}/{name}/{seed}",
        steps=steps,
        batch=options.batch or size.batch,
        seed=seed,
        eval_every=steps,
        checkpoint_every=steps,
        tensorboard=False,
    )
    data = dataclasses.replace(
        preset.data,
        data_dir={"listops": None, "text": options.text_dir, "image": options.image_dir}[task],
        buckets=(preset.data.length,),
        train_examples=options.train_examples or preset.data.train_examples,
        valid_examples=min(size.valid_examples, options.test_examples or size.valid_examples),
        test_examples=options.test_examples or size.test_examples,
        cache_dir=f"{options.folder}/data/{task}",
    )
    optimizer = dataclasses.replace(preset.optimizer, warmup_steps=steps // 10)
    chosen = network(name, length=preset.data.length, size=_PRESET_WINDOWS[task])
    try:
        model = chosen.within(preset.model)
        config = dataclasses.replace(preset, loop=loop, data=data, model=model, optimizer=optimizer)
    except ValueError as error:
        raise UserError(f"--mechanisms: {name} does not fit {task}: {error}") from error
    return SurveyRun(task, name, LRA.sized(config))


def survey_runs(options: SurveyOptions) -> list[SurveyRun]:
    """All runs. The first seed of every task and mechanism comes first, starting with linear cost, so that a survey
    that is stopped has the most rows."""
    return [
        run
        for seed in options.seeds
        for task in options.tasks
        for run in sorted(
            (survey_run(options, task, name, seed) for name in options.mechanisms),
            key=lambda run: not run.config.model.mechanism.linear_cost,
        )
    ]
