"""Starting from a trained decoder whose attention is replaced: `--convert_from` of train.lm and train.recall.

A run with `match_steps` has another one before it, in its folder: there each new mechanism learns the outputs of the
one that it replaces, on the hidden states of the trained network. docs/converting.md has the recipe.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, NamedTuple, Self

import flax.linen as nn
import jax
import jax.numpy as jnp
from etils import epath
from jax.sharding import Mesh
from jaxtyping import Array

from brl_jax.fields import Natural, Positive
from brl_jax.layers.core.attention_layer import SoftmaxConfig
from brl_jax.layers.core.protocol import Mechanism
from brl_jax.models import DecoderConfig, DecoderLM, huggingface
from brl_jax.models.conversion import (
    check_converts,
    check_matches,
    converted,
    matching_errors,
    mixers,
    replaced_layers,
    with_mixers,
)
from brl_jax.sharding import parameter_shardings
from train.engine.batch import Arrays, HeldOut
from train.engine.checkpoint import Checkpoints
from train.engine.config_file import read_values
from train.engine.errors import UserError
from train.engine.fields import Flat, Free
from train.engine.metrics import log
from train.engine.step import Objective, means, random_streams
from train.engine.storage import check_client
from train.tasks.run_config import RunConfig
from train.tasks.task import TOKEN, Streams, from_json

#: Fields of a network that training decides.
OWN = frozenset(("dropout", "remat", "dtype", "implementation"))
# And those that a conversion does.
_REPLACED = frozenset(("mechanism", "late_mechanism", "schedule", "early_layers", "swap_mechanisms"))


@dataclasses.dataclass(frozen=True)
class ConvertibleConfig(RunConfig):
    """A decoder's run, which may start from another decoder."""

    task: ClassVar[str]
    """The task of runs with this configuration."""

    model: Annotated[DecoderConfig, Flat]
    convert_from: Free[str] = ""
    """Folder of a trained decoder whose attention is replaced: a run of this command, or a folder in the layout of
    transformers (docs/converting.md). A new run takes its network, with the mechanisms that the options name, its
    tokenizer and its weights from it, and does not need it again once it has begun."""
    match_steps: Natural = 0
    """Steps of training before the run in which each new mechanism learns the outputs of the one that it replaces, in
    WORKDIR/matching. Other parameters do not move."""
    match_learning_rate: Positive = 3e-3
    """The highest learning rate of these steps."""

    def without_effect(self) -> dict[str, str]:
        unused = super().without_effect()
        if not self.match_steps:
            unused["match_learning_rate"] = "with match_steps 0"
        if not self.convert_from:
            return unused | {"match_steps": "without convert_from"}
        fields = {field.name for field in dataclasses.fields(self.model)} - OWN - _REPLACED
        reason = "with convert_from, whose network has it"
        softmax = [
            name
            for name in ("mechanism", "late_mechanism")
            if isinstance(getattr(self.model, name), SoftmaxConfig)
        ]
        fields |= {f"{name}.{field.name}" for name in softmax for field in dataclasses.fields(SoftmaxConfig)}
        return unused | {f"model.{name}": reason for name in fields}

    def resolved(self) -> Self:
        """With the network of `convert_from`."""
        if not self.convert_from:
            return super().resolved()
        network = teacher_of(self).config
        if network.lora_rank:
            raise UserError(
                f"--convert_from: {self.convert_from} has low-rank changes (lora_rank {network.lora_rank}); expected "
                "weights that python -m eval.export has merged"
            )
        values = {field.name: getattr(network, field.name) for field in dataclasses.fields(DecoderConfig)}
        values |= {name: getattr(self.model, name) for name in (*OWN, *_REPLACED)}
        for name in ("mechanism", "late_mechanism"):
            values[name] = _as_trained(values[name], network.mechanisms)
        try:
            model = type(self.model)(**values)
            (check_matches if self.match_steps else check_converts)(model, network)
        except ValueError as error:
            raise UserError(f"--convert_from {self.convert_from}: {error}") from error
        if self.match_steps and not any(replaced_layers(model, network)):
            raise UserError(
                "--match_steps: expected 0, as every layer keeps the mechanism it has in --convert_from"
            )
        return dataclasses.replace(self, model=model)


def _as_trained(mechanism: Mechanism | None, trained: Sequence[Mechanism]) -> Mechanism | None:
    """A mechanism with the trained network's options that give its parameters their meaning: for softmax attention the
    fields of `SoftmaxConfig`, and for another mechanism that the network also has all fields, if none is set."""
    alike = next((each for each in trained if type(each) is type(mechanism)), None)
    if mechanism is None:
        return None
    if not isinstance(mechanism, SoftmaxConfig):
        return alike if alike is not None and mechanism == type(mechanism)() else mechanism
    alike = alike or next((each for each in trained if isinstance(each, SoftmaxConfig)), mechanism)
    options = {field.name: getattr(alike, field.name) for field in dataclasses.fields(SoftmaxConfig)}
    return dataclasses.replace(mechanism, **options)


@contextlib.contextmanager
def naming(option: str) -> Iterator[None]:
    """Names the option in an error about a folder in the layout of transformers."""
    try:
        yield
    except (ImportError, OSError, ValueError) as error:
        # Its own words name the file; those of its cause, which `one_line` takes, do not.
        raise UserError(f"{option}: {' '.join(str(error).split())}") from error


class Teacher(NamedTuple):
    """A trained decoder.

    Attributes:
      config: its network.
      run: the configuration of its run; None for a folder in the layout of transformers.
      load: mesh -> its parameters, divided over the mesh.
    """

    config: DecoderConfig
    run: Any
    load: Callable[[Mesh], Any]


def teacher_of(config: ConvertibleConfig) -> Teacher:
    """The decoder in `convert_from`."""
    folder = config.convert_from
    check_client("--convert_from", folder)
    try:
        values = read_values(epath.Path(folder) / "config.json")
    except UserError as error:
        if not os.path.isdir(folder) or not os.path.isfile(os.path.join(folder, "config.json")):
            raise UserError(str(error).replace("--workdir", "--convert_from", 1)) from error
        return _pretrained(folder)
    task = values.pop("task")
    if task != config.task:
        raise UserError(f"--convert_from: {folder} is of the task {task!r}; expected {config.task}")
    values.pop("network", None)
    run = from_json(type(config), values, f"--convert_from: {folder}/config.json")
    checkpoints = Checkpoints(epath.Path(folder) / "checkpoints", log=log)
    checkpoints.choose("best", option="--convert_from")  # now, because reading the data may take minutes

    def load(mesh: Mesh) -> Any:
        step, params = checkpoints.read_params(_init(run.model), "best", option="--convert_from", mesh=mesh)
        log(f"weights of {folder}, step {step}")
        return params

    return Teacher(run.model, run, load)


def _pretrained(folder: str) -> Teacher:
    """A decoder in the layout of transformers."""
    with naming("--convert_from"):
        config = huggingface.load_config(folder)

    def load(mesh: Mesh) -> Any:
        init = _init(config)
        places = parameter_shardings(mesh, jax.eval_shape(init, jax.random.key(0)))
        fresh = jax.jit(lambda key: nn.unbox(init(key)), out_shardings=places)(jax.random.key(0))
        with naming("--convert_from"):
            return huggingface.load_onto(fresh, folder)

    return Teacher(config, None, load)


def _init(config: DecoderConfig) -> Callable[[Array], Any]:
    """key -> boxed parameters."""
    return lambda key: DecoderLM(config).init(key, TOKEN)["params"]


def _matching_folder(config: ConvertibleConfig) -> str:
    return os.path.join(config.loop.workdir, "matching")


def matching_config(config: Any) -> Any:
    """The configuration of the run that matches the layers; None without one."""
    if not config.match_steps:
        return None
    steps = config.match_steps
    return config.changed(
        loop={
            "workdir": _matching_folder(config),
            "steps": steps,
            "seed": (config.loop.seed + 1) % 2**63,  # other data than the run reads first
            "patience": 0,
            "log_gradient_std": False,
        },
        # Without weight decay the layers that keep their mechanism, which have no gradient, do not move.
        optimizer={
            "learning_rate": config.match_learning_rate,
            "warmup_steps": min(config.optimizer.warmup_steps, steps // 10),
            "weight_decay": 0.0,
        },
    )


def convert_onto(config: ConvertibleConfig, params: Any) -> Any:
    """The parameters that a run starts from, in the place of its fresh ones (`Objective.start`)."""
    mesh = jax.sharding.get_mesh()
    teacher = teacher_of(config)
    if config.match_steps:
        folder = epath.Path(_matching_folder(config))
        init = _both(config.model, teacher.config)
        _, read = Checkpoints(folder / "checkpoints", log=log).read_params(init, "last", mesh=mesh)
    else:
        read = {"teacher": teacher.load(mesh), "student": {}}

    def merged(params: Any, read: Any) -> Any:
        taken = converted(config.model, params, teacher.config, read["teacher"])
        return with_mixers(taken, read["student"])

    places = jax.tree.map(lambda x: x.sharding, params)
    return jax.jit(merged, donate_argnums=0, out_shardings=places)(params, read)


def _both(config: DecoderConfig, teacher: DecoderConfig) -> Callable[[Array], Any]:
    """key -> the boxed parameters of the matching: a trained network and the new mechanisms."""
    return lambda key: {"teacher": _init(teacher)(key), "student": mixers(_init(config)(key))}


def matching_objective(config: ConvertibleConfig) -> Objective:
    """The mean over the replaced layers of `brl_jax.models.conversion.matching_errors`, on the tokens of a batch; of
    each microbatch, if there are several.

    Its parameters are the trained network's, which stay as they are, and the mechanisms' of the new one.
    """
    found = teacher_of(config)
    own = {name: getattr(config.model, name) for name in ("dtype", "remat", "implementation")}
    teacher = dataclasses.replace(found.config, **own)
    replaced = jnp.asarray(replaced_layers(config.model, teacher), jnp.float32)

    def loss(params: Any, memory: Any, batch: Arrays, key: Array | None):
        tokens, weights = batch["tokens"], batch.get("weights")
        if weights is None or weights.shape != tokens.shape:
            weights = jnp.ones(tokens.shape, jnp.float32)
        errors = matching_errors(
            config.model,
            params["student"],
            teacher,
            params["teacher"],
            tokens,
            weights,
            positions=batch.get("positions"),
            segment_ids=batch.get("segment_ids"),
            deterministic=key is None,
            rngs=random_streams(key),
        )
        # Adam would enlarge the rounding errors of layers that stay.
        error = jnp.sum(errors * replaced) / jnp.sum(replaced)
        return error * jnp.sum(weights), jnp.sum(weights), memory

    def start(params: Any) -> Any:
        trained = found.load(jax.sharding.get_mesh())
        places = jax.tree.map(lambda x: x.sharding, params["student"])
        taken = functools.partial(converted, config.model, teacher_config=teacher)
        student = jax.jit(lambda own, trained: taken(own, teacher=trained), out_shardings=places)
        return {"teacher": trained, "student": student(params["student"], trained)}

    own_parameters = lambda path: path[0] == "student"  # noqa: E731
    return Objective(_both(config.model, teacher), loss, start=start, trained=own_parameters)


class TrainedAndNew:
    """The two networks of a matching, which `matching_objective` makes. `load_run` refuses a run of that name."""


class Matching:
    """The run that matches the layers, as a mixin before the class of a task, whose data it reads."""

    def model(self, config: Any) -> TrainedAndNew:
        return TrainedAndNew()

    def objective(self, model: Any, config: Any) -> Objective:
        return matching_objective(config)

    def before(self, config: Any) -> None:
        return None

    def load(self, config: Any, splits: Sequence[str]) -> Any:
        """The data of the run that it belongs to."""
        loop = {"workdir": os.path.dirname(config.loop.workdir)}
        return super().load(config.changed(loop=loop), splits)  # type: ignore[misc]

    def streams(self, config: Any, data: Any, mesh: Mesh) -> Streams:
        found = super().streams(config, data, mesh)  # type: ignore[misc]
        held_out: Any = copy.copy(found.held_out)
        held_out.num_bytes = None  # the loss is not in nats
        return Streams(found.training, held_out, held_out)

    def measures(
        self, config: Any, data: Any, split: str, held_out: HeldOut, sums: Mapping[str, float]
    ) -> dict[str, Any]:
        return means(sums)

    def next_commands(self, config: Any, data: Any) -> Sequence[Sequence[str]]:
        return ()

    def finish(self, *args: Any) -> None: ...
