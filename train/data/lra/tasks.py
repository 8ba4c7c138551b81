"""The six tasks of the Long Range Arena, and the sources of their examples."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

from etils import epath

from brl_jax.fields import Checked, Length, Natural, Seed
from train.data.bucketed import default_buckets
from train.data.dataset import cache_folder
from train.data.examples import Examples, Source, open_examples
from train.data.lra import image, listops, pathfinder, retrieval, text
from train.data.lra.listops import ListOpsSpec
from train.engine.errors import UserError, reason
from train.engine.fields import Decided, Free
from train.engine.storage import check_local


class TaskSizes(NamedTuple):
    """What a task decides of its model: the classes, the tokens, and whether an example is a pair of sequences."""

    num_classes: int
    vocab_size: int
    is_pair: bool = False


LRA_TASKS = {
    "listops": TaskSizes(listops.NUM_CLASSES, listops.VOCAB_SIZE),
    "text": TaskSizes(text.NUM_CLASSES, 256),
    "retrieval": TaskSizes(retrieval.NUM_CLASSES, 256, is_pair=True),
    "image": TaskSizes(image.NUM_CLASSES, 256),
    "pathfinder": TaskSizes(pathfinder.NUM_CLASSES, 256),
    "pathx": TaskSizes(pathfinder.NUM_CLASSES, 256),
}


@dataclasses.dataclass(frozen=True)
class LraDataConfig(Checked):
    """The examples of a task."""

    task: str = "listops"
    """listops, text, retrieval, image, pathfinder or pathx."""
    data_dir: str | None = None
    """A folder of the Long Range Arena's release, or one with the task's files: basic_*.tsv (listops), aclImdb or
    {train,test}.jsonl (text), new_aan_pairs.*.tsv or Gutenberg's books.tsv (retrieval), an .npz (image), images and
    metadata (pathfinder, pathx). Without it listops, pathfinder and pathx are generated; text and image come from
    TensorFlow Datasets."""
    length: Length = 2000
    """Tokens of a sequence; longer ones are truncated."""
    buckets: tuple[Length, ...] = ()
    """Lengths that batches are padded to; by default an eighth, a quarter, a half and all of --length."""
    train_examples: Natural = 0
    """Number of training examples, generated or taken from the beginning; 0: 96,000 of listops, 16,000 of pathfinder,
    20,000 pairs of novels, or all of the files."""
    valid_examples: Natural = 0
    """The same for validation."""
    test_examples: Free[Natural] = 0
    """The same for the test."""
    data_seed: Seed = 0
    """Seed of generated examples."""
    resolution: Literal[32, 64, 128] = 32
    """Pixels of a side of pathfinder's images: 32, 64 or 128."""
    dashes: Literal[6, 9, 14] = pathfinder.HARD
    """Dashes of its two long paths: 14 (the arena's, the release's hard set), or 9 or 6 of the easier sets."""
    marks: Decided[bool] = False
    """Whether each generated image of pathfinder has a second sequence, of the marks of its pixels."""
    listops: ListOpsSpec = ListOpsSpec()
    """The expressions that listops generates."""
    processes: Free[Natural] = 0
    """Processes that generate examples; 0: one a core. The examples do not depend on it."""
    cache_dir: Free[str | None] = None
    """Local folder for the examples, which runs may share; the run's own folder by default."""

    def __post_init__(self):
        if self.task not in LRA_TASKS:
            raise ValueError(f"task must be one of {', '.join(LRA_TASKS)}, got {self.task!r}")
        check_local("cache_dir", self.cache_dir)
        side = self.side
        if side is not None and self.length < side**2:
            raise ValueError(
                f"length must be at least {side**2} for images of {side} x {side}, got {self.length}"
            )
        if self.buckets and (min(self.buckets) < 1 or max(self.buckets) < self.length):
            raise ValueError(
                f"buckets must be 1 or more each, the longest at least length={self.length}, got "
                + " ".join(map(str, self.buckets))
            )

    def without_effect(self) -> dict[str, str]:
        unused: dict[str, str] = {}
        if self.data_dir is not None:
            unused |= dict.fromkeys(("listops", "processes"), "with a data_dir")
            if self.task != "retrieval":
                unused["data_seed"] = "with a data_dir"
        if self.data_dir is None and self.task in ("image", "text"):
            unused |= dict.fromkeys(("data_seed", "processes"), f"on {self.task}, which is not generated")
        if self.task not in ("pathfinder", "pathx"):
            unused |= dict.fromkeys(("resolution", "dashes"), f"on {self.task}")
        if self.task != "listops":
            unused["listops"] = f"on {self.task}"
        return unused

    @property
    def side(self) -> int | None:
        """Pixels of a side of the task's images; None for a task of others."""
        sides = {"image": image.RESOLUTION, "pathfinder": self.resolution, "pathx": self.resolution}
        return sides.get(self.task)

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        """The buckets."""
        return tuple(sorted(self.buckets)) or default_buckets(self.length)


# The default numbers of generated examples: for listops as published; for pathfinder a tenth of the release's 200,000.
_SIZES = {
    "listops": {"train": 96_000, "valid": 2_000, "test": 2_000},
    "retrieval": {"train": 20_000, "valid": 2_000, "test": 2_000},
    "pathfinder": {"train": 16_000, "valid": 2_000, "test": 2_000},
    "pathx": {"train": 16_000, "valid": 2_000, "test": 2_000},
}


def sizes(config: LraDataConfig) -> dict[str, int]:
    """The number of examples of each split of a generated set."""
    standard = _SIZES.get(config.task, dict.fromkeys(("train", "valid", "test"), 0))
    return {split: getattr(config, f"{split}_examples") or number for split, number in standard.items()}


def open_source(config: LraDataConfig) -> Source:
    """Where a task's examples come from."""
    if config.data_dir is None:
        match config.task:
            case "listops":
                return listops.generated_source(
                    config.listops, config.data_seed, sizes(config), config.processes
                )
            case "pathfinder" | "pathx":
                spec = pathfinder.PathfinderSpec(config.resolution, config.dashes, config.marks)
                return pathfinder.generated_source(spec, config.data_seed, sizes(config), config.processes)
            case "image":
                return image.open_tfds_source()
            case "text":
                return text.open_tfds_source()
        raise UserError(
            "--data_dir: expected a folder with new_aan_pairs.*.tsv or Gutenberg's books.tsv, got none"
        )
    if config.marks:
        raise UserError(
            f"--data_dir: expected none, because only generated images have marks, got {config.data_dir}"
        )
    folder = Path(config.data_dir).expanduser()
    if not folder.exists():
        raise UserError(f"--data_dir: {folder} does not exist")
    match config.task:
        case "listops":
            source = listops.open_files(folder)
        case "text":
            source = text.open_files(folder)
        case "retrieval":
            source = retrieval.open_files(folder, config.data_seed, sizes(config))
        case "image":
            source = image.open_files(folder)
        case _:
            source = pathfinder.open_files(folder, config.resolution, config.dashes)
    if source is None:
        raise UserError(f"--data_dir: {folder} has no {config.task} files; see --help-all for those expected")
    return source


def load(
    config: LraDataConfig, workdir: str | os.PathLike[str], splits: Sequence[str]
) -> tuple[Source, dict[str, Examples]]:
    """The examples of a run, made if they do not exist yet, and their source."""
    source = open_source(config)
    cache = cache_folder(config.cache_dir, epath.Path(workdir))
    opened = {}
    for split in splits:
        limit = getattr(config, f"{split}_examples")
        folder = cache / f"lra-{config.task}-{source.fingerprint}-{config.length}-{limit or 'all'}"
        try:
            opened[split] = open_examples(
                source,
                split,
                folder,
                length=config.length,
                limit=limit,
                num_classes=LRA_TASKS[config.task].num_classes,
            )
        except OSError as error:
            option = "--cache_dir" if config.cache_dir else "--workdir"
            raise UserError(f"{option}: cannot write under {folder}: {reason(error)}") from error
    return source, opened
