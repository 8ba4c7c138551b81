"""What runs on a task of the Long Range Arena have in common, classifiers and their pretraining: the data."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from brl_jax.configuration import to_json
from train.data.bucketed import EvalBatches, TrainBatches
from train.data.examples import Examples, Source
from train.data.lra.tasks import load
from train.engine.config_file import flatten, option_name
from train.engine.fields import Mark, marked
from train.tasks.task import C, Task


class LraData(NamedTuple):
    """The examples of some splits, and where they come from."""

    source: Source
    examples: Mapping[str, Examples]


class ArenaTask(Task[C, LraData]):
    """A task on the sequences of the arena."""

    def load(self, config: C, splits: Sequence[str]) -> LraData:
        return LraData(*load(config.data, config.loop.workdir, splits))

    def describe_data(self, config: C, data: LraData) -> str:
        counts = ", ".join(f"{len(examples):,} examples {split}" for split, examples in data.examples.items())
        return f"{config.data.task}, {data.source.name}, {counts}"

    def training_batches(self, config: C, data: LraData, **options: Any) -> Any:
        return TrainBatches(data.examples["train"], buckets=config.data.padded_lengths, **options)

    def held_out_batches(self, config: C, data: LraData, split: str, **options: Any) -> Any:
        return EvalBatches(data.examples[split], buckets=config.data.padded_lengths, **options)


def changed_options(preset: Any, config: Any, omitted: Collection[str] = ()) -> list[str]:
    """The options of a command line that give a preset the data and the model of another configuration.

    Args:
      preset, config: of the same task, or of two whose data and models have fields in common; only these are compared.
      omitted: dotted names of fields to leave out, in addition to those that a task decides.
    """
    decided = {name for each in (preset, config) for name in marked(type(each), Mark.DECIDED)}
    old, new = (
        flatten({part: to_json(getattr(x, part)) for part in ("data", "model")}) for x in (preset, config)
    )
    words = []
    for path in [name for name in new if name.endswith("mechanism.name")]:
        if new[path] != old.get(path):
            part = path.removesuffix(".name")
            words += [f"--{option_name(part)}", new[path]]
            # Other mechanisms have other fields; the option sets them to their defaults.
            default = to_json(type(getattr(config.model, part.removeprefix("model.")))())
            old |= {f"{part}.{name}": value for name, value in flatten(default).items()}
    for name, value in new.items():
        if name in old and value != old[name] and name not in decided and name not in omitted:
            words += [f"--{option_name(name)}", *map(str, value if isinstance(value, list) else [value])]
    return words
