"""One step of training and one of evaluation: pure functions of (state, batch), for any task.

An `Objective` defines the task. Only the task interprets the `memory`, a pytree that is carried from batch to batch.
The caller jits the step, with its own shardings.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import flax.linen as nn
import flax.struct
import jax
import jax.numpy as jnp
import optax
from flax import traverse_util
from jaxtyping import Array, Float, Int, UInt32

from brl_jax.sharding import constrain
from train.engine.batch import Arrays, Batch, num_rows
from train.engine.moments import GradientMoments, add_gradient, fresh_moments, relative_deviations
from train.engine.optimizer import Schedule


def random_streams(key: Array | None) -> dict[str, Array]:
    """The random streams of a network's call in training: "dropout", and "sample" for mechanisms that sample tokens.
    In evaluation, where key is None, there are no streams."""
    return {} if key is None else {"dropout": key, "sample": jax.random.fold_in(key, 1)}


def outputs(model: nn.Module, params: Any, key: Array | None, *inputs: Any, **options: Any) -> Any:
    """What a network returns: in training with random streams from the key, in evaluation (None) without."""
    return model.apply(
        {"params": params}, *inputs, deterministic=key is None, rngs=random_streams(key), **options
    )


def weighted_sums(losses: Array, weights: Array, memory: Any, **averages: Array) -> tuple[Any, ...]:
    """What a `Loss` returns, from the loss, the weight and the averages of each target."""
    sums = {name: jnp.sum(each * weights) for name, each in averages.items()}
    return jnp.sum(losses * weights), jnp.sum(weights), memory, sums


class Loss(Protocol):
    """(params, memory, batch, key) -> loss summed over the batch's targets, their weight, the new memory; and,
    where the objective has `averages`, a mapping from their names to sums over the targets.

    In evaluation key is None: there is no dropout, and samples are always the same.
    """

    def __call__(self, params: Any, memory: Any, batch: Arrays, key: Array | None) -> tuple[Any, ...]: ...


@dataclasses.dataclass(frozen=True)
class Objective:
    """What a task defines for the loop.

    Attributes:
      init: key -> parameters, boxed with their logical axis names.
      loss: see `Loss`.
      init_memory: number of rows -> the empty memory, a pytree or None.
      averages: names of what is reported with the loss, also averaged over the targets ("accuracy").
      best: which held-out measure decides between two checkpoints: "loss" (lower is better), or one of the averages
        (higher is better).
      rates: boxed parameters -> the factor on the learning rate of each, or None for one rate (`train.tasks.mup`).
      start: the parameters of `init`, unboxed and on their devices -> the parameters that a new run starts from.
      trained: path of a parameter (its names, from the outside in) -> whether steps change it; the others have no
        gradients and no optimiser state. None: all are changed.
    """

    init: Callable[[Array], Any]
    loss: Loss
    init_memory: Callable[[int], Any] = lambda rows: None
    averages: tuple[str, ...] = ()
    best: str = "loss"
    rates: Callable[[Any], Any] = lambda boxed: None
    start: Callable[[Any], Any] = lambda params: params
    trained: Callable[[tuple[str, ...]], bool] | None = None

    def split(self, params: Any) -> tuple[Any, Any]:
        """The parameters (nested dicts) that steps change, and the others."""
        if self.trained is None:
            return params, {}
        parts: tuple[dict[Any, Any], ...] = {}, {}
        for path, leaf in traverse_util.flatten_dict(params).items():
            parts[not self.trained(path)][path] = leaf
        trained, frozen = map(traverse_util.unflatten_dict, parts)
        return trained, frozen

    def join(self, trained: Any, frozen: Any) -> Any:
        """All parameters, from the two parts of `split`."""
        if self.trained is None:
            return trained
        flat = traverse_util.flatten_dict
        return traverse_util.unflatten_dict(flat(trained) | flat(frozen))

    def sums(
        self, params: Any, memory: Any, batch: Arrays, key: Array | None
    ) -> tuple[dict[str, Array], Any]:
        """The sums over a batch's targets by name, "loss" and "weight" among them, and the new memory."""
        total, weight, memory, *averages = self.loss(params, memory, batch, key)
        memory = self.shard_memory(memory, num_rows(batch))
        return {"loss": total, "weight": weight, **(averages[0] if averages else {})}, memory

    def memory_names(self, memory: Any, rows: int, name: Callable[[Any, tuple[str | None, ...]], Any]) -> Any:
        """name(array, names of its dimensions) for each array of a memory with this number of rows.

        Only the task interprets its memory; the dimension that grows with the number of rows is called "batch".
        """

        def one(array: Any, shape: Any, larger: Any) -> Any:
            pairs = zip(shape.shape, larger.shape)
            return name(array, tuple(None if size == more else "batch" for size, more in pairs))

        shapes = (jax.eval_shape(lambda n=n: self.init_memory(n)) for n in (rows, rows + 1))
        return jax.tree.map(one, memory, *shapes)

    def shard_memory(self, memory: Any, rows: int) -> Any:
        """The memory, sharded over the mesh by its rows."""
        return self.memory_names(memory, rows, constrain)


class TrainState(flax.struct.PyTreeNode):
    """Everything that a step changes, all of which is saved.

    Attributes:
      step: () int32, steps done.
      params: the parameters, unboxed.
      opt_state: optax's state.
      key: (2,) uint32, the run's random key; the key of a step is derived from it with `fold_in`.
      memory: what the rows of each microbatch carry, stacked into leaves (accumulation, ...).
      moments: of the gradients so far (`train.engine.moments`), or None if they are not logged.
    """

    step: Int[Array, ""]
    params: Any
    opt_state: Any
    key: UInt32[Array, " key"]
    memory: Any
    moments: GradientMoments | None = None


def fresh_memory(objective: Objective, rows: int, accumulation: int) -> Any:
    """The empty memory of `accumulation` microbatches of `rows` rows: leaves (accumulation, ...)."""
    return jax.tree.map(
        lambda leaf: jnp.broadcast_to(leaf, (accumulation, *leaf.shape)), objective.init_memory(rows)
    )


def init_state(
    objective: Objective,
    params: Any,
    optimizer: optax.GradientTransformation,
    *,
    key: Array,
    rows: int,
    accumulation: int,
    log_gradient_std: bool = False,
) -> TrainState:
    """The state before the first step.

    Args:
      params: unboxed parameters; key: the run's typed random key; rows: rows of a microbatch.
      log_gradient_std: whether steps keep and report the moments of the gradients.
    """
    trained, _ = objective.split(params)
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=optimizer.init(trained),
        key=jax.random.key_data(key),
        memory=fresh_memory(objective, rows, accumulation),
        moments=fresh_moments(trained) if log_gradient_std else None,
    )


def classification(
    logits: Float[Array, "*B C"], targets: Int[Array, "*B"], key: Array | None = None, z_loss: float = 0.0
) -> tuple[Float[Array, "*B"], Float[Array, "*B"]]:
    """The loss of each target in nats (`softmax_loss`), and 1 where it is the likeliest class, else 0."""
    right = (logits.argmax(axis=-1).astype(targets.dtype) == targets).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, targets)
    return softmax_loss(losses, logits, key, z_loss), right


def softmax_loss(
    losses: Float[Array, "*B"], logits: Float[Array, "*B C"], key: Array | None, z_loss: float
) -> Float[Array, "*B"]:
    """The cross-entropies of a softmax with z-loss: in training, where there is a key, z_loss * log(Z)^2 more (PaLM,
    arXiv:2204.02311, section 5)."""
    if key is None or not z_loss:
        return losses
    return losses + z_loss * jnp.square(jax.nn.logsumexp(logits, axis=-1))


def means(sums: Mapping[str, Any]) -> dict[str, Any]:
    """Sums over targets (see `Objective.sums`) divided by the targets' weight."""
    return {name: total / sums["weight"] for name, total in sums.items() if name != "weight"}


def perplexity(loss: float) -> float:
    """The exponential of a loss in nats; inf if it exceeds a float."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


def make_train_step(
    objective: Objective, optimizer: optax.GradientTransformation, schedule: Schedule, accumulation: int
) -> Callable[[TrainState, Batch], tuple[TrainState, dict[str, Array]]]:
    """(state, batch) -> (state, metrics), to be jitted with the state donated.

    batch: its arrays are (accumulation * rows, ...). Rows [a * rows, (a + 1) * rows) are microbatch a, which carries
    its own memory. Gradients are summed over the microbatches and divided by the weight of all targets, so that they
    equal the gradients of one large batch.
    metrics: float32 scalars "loss" and the objective's averages (means over the targets), "grad_norm" (before
    clipping), "learning_rate", and where the state has moments "grad_rsd" and "grad_rsd_tensors" of all steps so far
    (`train.engine.moments`).
    """

    def train_step(state: TrainState, batch: Batch):
        rows = num_rows(batch.arrays) // accumulation
        micro = {
            name: constrain(
                x.reshape(accumulation, rows, *x.shape[1:]), (None, "batch", *(None for _ in x.shape[1:]))
            )
            for name, x in batch.arrays.items()
        }
        memory = jax.tree.map(
            lambda fresh, old: jnp.where(batch.reset, fresh, old),
            fresh_memory(objective, rows, accumulation),
            state.memory,
        )
        step_key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.step)

        trained, frozen = objective.split(state.params)

        def loss(trained, memory, batch, key):
            sums, memory = objective.sums(objective.join(trained, frozen), memory, batch, key)
            return sums["loss"], (sums, memory)

        def microbatch(total, xs):
            index, batch, memory = xs
            key = jax.random.fold_in(step_key, index)
            (_, (sums, memory)), grads = jax.value_and_grad(loss, has_aux=True)(trained, memory, batch, key)
            return jax.tree.map(jnp.add, total, (sums, grads)), memory

        names = ("loss", "weight", *objective.averages)
        zeros = (dict.fromkeys(names, jnp.float32(0.0)), jax.tree.map(jnp.zeros_like, trained))
        indices = jnp.arange(accumulation, dtype=jnp.int32)
        (sums, grads), memory = jax.lax.scan(microbatch, zeros, (indices, micro, memory))
        # Where no target has weight, all sums are 0: the loss and the gradients are too.
        weight = jnp.where(sums["weight"] == 0, jnp.ones_like(sums["weight"]), sums["weight"])
        grads = jax.tree.map(lambda g: g / weight.astype(g.dtype), grads)
        updates, opt_state = optimizer.update(grads, state.opt_state, trained)
        metrics = {
            **means({**sums, "weight": weight}),
            "grad_norm": optax.tree.norm(grads),
            "learning_rate": jnp.asarray(schedule(state.step), jnp.float32),
        }
        moments = state.moments
        if moments is not None:
            moments = add_gradient(moments, grads)
            metrics |= relative_deviations(moments)
        state = state.replace(
            step=state.step + 1,
            params=objective.join(optax.apply_updates(trained, updates), frozen),
            opt_state=opt_state,
            memory=memory,
            moments=moments,
        )
        return state, metrics

    return train_step


def make_eval_step(objective: Objective) -> Callable[[Any, Any, Arrays], tuple[dict[str, Array], Any]]:
    """(params, memory, arrays of a batch) -> (sums over the targets, memory), see `Objective.sums`; no dropout."""

    def eval_step(params, memory, arrays: Arrays):
        return objective.sums(params, memory, arrays, None)

    return eval_step
