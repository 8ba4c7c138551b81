"""The settings of a training loop."""

from __future__ import annotations

import dataclasses
from typing import Literal

from brl_jax.fields import Checked, Count, Natural, Rows, Seed, Steps
from train.engine.fields import Free
from train.engine.profiling import parse_steps
from train.engine.storage import check_address


@dataclasses.dataclass(frozen=True)
class LoopConfig(Checked):
    """The training loop: how long it runs, how much it takes at a time, what it measures and keeps."""

    workdir: Free[str] = "runs/stdlib"
    """Folder of the run, local or gs://BUCKET/FOLDER: config.json, metrics.jsonl, checkpoints, TensorBoard events. The
    same command again resumes the run where it stopped. Without a PRESET, what a command leaves out stays as it was, so
    that --workdir is enough."""
    steps: Free[Steps] = 1000
    """Number of training steps. A resumed run may have another number, which its learning rate then follows."""
    seed: Seed = 0
    """Seed of the parameters, the dropout and the order of the data."""
    batch: Rows = 16
    """Rows of a step."""
    accumulation: Count = 1
    """Microbatches that the rows of a step are split into; their gradients are summed."""
    dispatch: Free[Count] = 1
    """Steps that the devices take in one call, all with batches of one shape; more save time where steps are short."""
    eval_every: Free[Steps] = 250
    """Steps from one evaluation to the next; there is one more at the end."""
    patience: Free[Natural] = 0
    """The run ends after this many evaluations in a row that do not improve on the best one; 0: it never ends early."""
    checkpoint_every: Free[Steps] = 250
    """Steps from one checkpoint to the next; each evaluation and the end of the run save one too."""
    keep_checkpoints: Free[Count] = 2
    """Number of the newest checkpoints to keep, in addition to the one with the best evaluation."""
    tensorboard: Free[bool] = True
    """Write TensorBoard event files next to metrics.jsonl."""
    log: Free[Literal["", "wandb"]] = ""
    """Send the metrics to Weights & Biases too (extra wandb)."""
    profile: Free[str] = ""
    """FIRST:LAST: trace these steps for TensorBoard, in the run's folder."""
    compilation_cache: Free[str] = ""
    """Folder of compiled programs, which the next start reads; "none" keeps none. By default
    JAX_COMPILATION_CACHE_DIR, or else ~/.cache/brl-jax/xla."""
    log_gradient_std: bool = False
    """Log the relative standard deviation of the gradients' norms over the run (train/engine/moments.py)."""

    def __post_init__(self):
        if not self.workdir:
            raise ValueError("workdir must be a folder's path, got an empty one")
        parse_steps(self.profile)
        check_address("workdir", self.workdir)
        if self.batch % self.accumulation:
            raise ValueError(
                f"batch must be a multiple of accumulation={self.accumulation}, got {self.batch}"
            )

    @property
    def microbatch(self) -> int:
        """Rows of a microbatch."""
        return self.batch // self.accumulation
