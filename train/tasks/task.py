"""A task: everything that is particular to one kind of run. Training and evaluation work with any task.

A new task is one file in train/tasks (or anywhere else) with a configuration class, a subclass of `Task`, and a command
of two lines:

    def main(argv):
        train_main([TASK], argv, name="train.copy")
"""

from __future__ import annotations

import abc
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array

from brl_jax.configuration import configuration, to_json
from train.engine.batch import Arrays, Batch, HeldOut, Stream
from train.engine.config_file import differences, read_values
from train.engine.errors import UserError
from train.engine.evaluation import evaluate
from train.engine.fields import Mark, marked
from train.engine.mesh import host_rows, open_mesh
from train.engine.metrics import log
from train.engine.step import Loss, Objective, classification, make_eval_step, means, weighted_sums
from train.tasks.mup import make_rates
from train.tasks.run_config import RunConfig

C = TypeVar("C", bound=RunConfig)
D = TypeVar("D")
T = TypeVar("T")


class Streams(NamedTuple):
    """The batches of a run: for training, for the evaluations on the way, and for the one at the end."""

    training: Stream
    held_out: HeldOut
    full_held_out: HeldOut


def shapes(integers: Mapping[str, Sequence[int]], floats: Mapping[str, Sequence[int]]) -> dict[str, Any]:
    """The arrays of a batch, int32 and float32."""
    kinds = (jnp.int32, integers), (jnp.float32, floats)
    return {
        name: jax.ShapeDtypeStruct(tuple(shape), kind) for kind, of in kinds for name, shape in of.items()
    }


#: The inputs of a network that reads tokens, to initialise it.
TOKEN = np.zeros((1, 1), np.int32)


def objective_of(model: Any, inputs: Sequence[np.ndarray], loss: Loss, **options: Any) -> Objective:
    """The objective of a network that these inputs initialise, with the learning rates that its widths ask for."""
    rates = make_rates(model.config)
    return Objective(lambda key: model.init(key, *inputs)["params"], loss, rates=rates, **options)


def classifier_objective(
    model: Any,
    inputs: Sequence[np.ndarray],
    logits: Callable[[Any, Arrays, Array | None], Array],
    z_loss: float,
    **options: Any,
) -> Objective:
    """Cross-entropy and accuracy of a batch's "targets", each with its weight, by logits(params, batch, key)."""

    def loss(params: Any, memory: Any, batch: Arrays, key: Array | None) -> Any:
        nll, right = classification(logits(params, batch, key), batch["targets"], key, z_loss)
        return weighted_sums(nll, batch["weights"], memory, accuracy=right)

    return objective_of(model, inputs, loss, averages=("accuracy",), **options)


class Task(abc.ABC, Generic[C, D]):
    """One kind of run.

    C is the class of its configuration, D what `load` returns: the data of a run.

    Attributes:
      name: recorded in config.json as "task"; no other task has it.
      about: a line for --help.
      config_class: the class of its configuration; no other task has it.
      presets: named configurations; default_preset: the one used when the command line names none.
      is_sized_by_data: whether `sized` needs the data; if not, the model is checked before the data are read.
      network: makes the network from the configuration's `model`.
      following: the commands to run when training is done, on the run's folder {run}: how to measure it, and how to see
        what it learnt.
    """

    name: str
    about: str
    config_class: type[C]
    presets: Mapping[str, C]
    default_preset: str
    is_sized_by_data: bool = False
    network: Any
    following: Sequence[str] = ()

    @abc.abstractmethod
    def sized(self, config: C, data: D | None = None) -> C:
        """The configuration with the model's sizes set by the task and its data.

        Args:
          data: None if they are not read, as when a run is only planned.
        """

    def model(self, config: C) -> Any:
        """The network of a configuration (from `sized`). Raises ValueError if its parts don't fit each other."""
        return self.network(config.model)

    @abc.abstractmethod
    def objective(self, model: Any, config: C) -> Objective:
        """What the model is trained on, and how."""

    @abc.abstractmethod
    def batch_shapes(self, config: C, rows: int) -> dict[str, jax.ShapeDtypeStruct]:
        """The arrays of a batch with this number of rows (the longest, where lengths differ)."""

    @abc.abstractmethod
    def load(self, config: C, splits: Sequence[str]) -> D:
        """Reads or makes the data of some of the splits train, valid and test."""

    @abc.abstractmethod
    def training_batches(self, config: C, data: D, **options: Any) -> Stream:
        """Endless training batches; options: batch, seed and rows (`train.data.repeated`)."""

    @abc.abstractmethod
    def held_out_batches(self, config: C, data: D, split: str, **options: Any) -> HeldOut:
        """One pass over the valid or test split; options: batch and rows."""

    def training_stream(self, config: C, data: D, mesh: Mesh) -> Stream:
        """The training batches; those rows that belong to this process."""
        batch = config.loop.batch
        return self.training_batches(
            config, data, batch=batch, seed=config.loop.seed, rows=host_rows(mesh, batch)
        )

    def held_out(self, config: C, data: D, split: str, mesh: Mesh | None = None, **options: Any) -> HeldOut:
        """One pass over the valid or test split, in microbatches; on a mesh, those rows that belong to this process."""
        batch = config.loop.microbatch
        return self.held_out_batches(config, data, split, batch=batch, rows=host_rows(mesh, batch), **options)

    def before(self, config: C) -> tuple[Task[C, D], C] | None:
        """A run that has to end before this one begins, as this one starts from it."""
        return None

    def streams(self, config: C, data: D, mesh: Mesh) -> Streams:
        """All batches of a training run."""
        held_out = self.held_out(config, data, "valid", mesh)
        return Streams(self.training_stream(config, data, mesh), held_out, held_out)

    def row_length(self, config: C) -> int | None:
        """Tokens of a row, where a mesh may share them among devices; None if it may not."""
        return None

    def measures(self, config: C, data: D, split: str, held_out: HeldOut, sums: Mapping[str, float]) -> dict:
        """What an evaluation reports of the sums over a split (see `train.engine.evaluation.evaluate`)."""
        return means(sums)

    def describe_data(self, config: C, data: D) -> str:
        """The data of a run in a few words, for people."""
        return self.name

    def next_commands(self, config: C, data: D) -> Sequence[Sequence[str]]:
        """`following`, each a module and its arguments."""
        return [[word.format(run=config.loop.workdir) for word in line.split()] for line in self.following]

    def finish(self, config: C, data: D, model: Any, params: Any, mesh: Mesh) -> None:
        """Called at the end of training."""

    # What every task does alike.

    def open_mesh(self, config: C, devices: Sequence[Any] | None = None) -> Mesh:
        """The mesh of a run, by default of the devices of all processes."""
        mesh = open_mesh(config.mesh, config.loop, devices)
        model, length = config.model, self.row_length(config)
        sequence, tensor = mesh.shape["sequence"], mesh.shape["tensor"]
        if length is not None and sequence > 1:
            if length % sequence:
                raise UserError(f"--length: expected a multiple of --mesh.sequence {sequence}, got {length}")
            for mechanism in model.mechanisms:
                try:
                    mechanism.check_shards(length, sequence)
                except ValueError as error:
                    raise UserError(f"--mesh.sequence {sequence}: --mechanism.{error}") from error
        key_heads = model.num_heads if model.num_kv_heads is None else model.num_kv_heads
        for name, heads in (("num_heads", model.num_heads), ("num_kv_heads", key_heads)):
            if heads % tensor:
                raise UserError(f"--mesh.tensor: expected a divisor of --{name} {heads}, got {tensor}")
        return mesh

    def build(self, config: C) -> Any:
        """The model of a configuration (from `sized`), checked on a batch's shapes."""
        rows = config.loop.microbatch
        try:
            model = self.model(config)
            objective = self.objective(model, config)
            jax.eval_shape(
                lambda key, batch: objective.sums(
                    objective.init(key), objective.init_memory(rows), batch, key
                ),
                jax.random.key(0),
                self.batch_shapes(config, rows),
            )
        except (ValueError, NotImplementedError) as error:
            raise UserError(f"the model's options do not fit: {error}") from error
        return model

    def measure(self, config: C, model: Any, params: Any, data: D, split: str) -> dict[str, Any]:
        """The measures of trained parameters on a split."""
        objective = self.objective(model, config)
        held_out = self.held_out(config, data, split)
        sums = evaluate(jax.jit(make_eval_step(objective)), objective, params, held_out)
        assert sums is not None
        return self.measures(config, data, split, held_out, sums)

    def predictions(
        self, config: C, data: D, split: str, answer: Callable[[Batch], Any]
    ) -> tuple[np.ndarray, np.ndarray]:
        """The answers to the targets of a split that have weight, and the targets, in one order."""
        found = []
        for batch in self.held_out(config, data, split):
            kept = np.asarray(batch["weights"]) > 0
            found.append((np.asarray(answer(batch))[kept], batch["targets"][kept]))
        answers, targets = (np.concatenate(parts) for parts in zip(*found))
        return answers, targets

    def to_json(self, config: C) -> dict[str, Any]:
        """What config.json holds: the task's name and the configuration."""
        return {"task": self.name, **to_json(config)}

    def differences(
        self, old: Mapping[str, Any], config: C, free: Collection[str] | None = None
    ) -> list[str]:
        """Fields, as "name old -> new", that keep a run of `old` from being resumed with a configuration; for a run
        of another task, the task alone.

        Args:
          old: from config.json or a checkpoint. Fields that its version did not have yet have their defaults.
          free: dotted names of the fields that may differ, by default `free_fields`.
        """
        task = old.get("task", self.name)
        if task != self.name:
            return [f"task {task} -> {self.name}"]
        try:
            values = {name: value for name, value in old.items() if name not in ("task", "network")}
            old = {"task": task, **to_json(from_json(self.config_class, values, "config.json"))}
        except UserError:  # it is of another version, which has fields that this one lacks
            pass
        free = self.free_fields() if free is None else free
        return differences(old, self.to_json(config), {"network", *free})

    def free_fields(self) -> frozenset[str]:
        """Dotted names of the configuration's fields that a resumed run may change."""
        return frozenset(marked(self.config_class, Mark.FREE))


def from_json(kind: type[T], values: Mapping[str, Any], source: str) -> T:
    """The configuration that `brl_jax.configuration.to_json` wrote; missing fields have their defaults."""
    try:
        return configuration(kind, values)
    except ValueError as error:
        raise UserError(f"{source}: {error}") from error


def read_config(tasks: Sequence[Task[Any, Any]], path: str | os.PathLike[str]) -> tuple[Task[Any, Any], Any]:
    """The task and the configuration of a run, from its config.json."""
    return task_and_config(tasks, read_values(path), os.fspath(path))


def task_and_config(
    tasks: Sequence[Task[Any, Any]], values: Mapping[str, Any], source: str
) -> tuple[Task[Any, Any], Any]:
    """The task and the configuration that config.json has; `source` names it in errors."""
    name = values["task"]
    known = {task.name: task for task in tasks}
    if name not in known:
        raise UserError(f"--workdir: {source} is of the task {name!r}; expected {' or '.join(known)}")
    fields = {key: value for key, value in values.items() if key not in ("task", "network")}
    return known[name], from_json(known[name].config_class, fields, source)


def find_runs(tasks: Sequence[Task[Any, Any]], folder: Path) -> list[Path]:
    """The folders of the runs of these tasks under `folder`, at any depth. A config.json that cannot be read is left
    out, with a line that says so."""
    known = {task.name for task in tasks}
    found = []
    for path in sorted(folder.rglob("config.json")):
        try:
            values = read_values(path)
        except UserError as error:
            log(f"{path.parent} is left out: {error}")
            continue
        if values["task"] in known:
            found.append(path.parent)
    return found
