"""Trained networks, read from the folder of a run without the training code. Needs the extra `train`."""

from __future__ import annotations

import json
import os
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from brl_jax.configuration import configuration
from brl_jax.models import (
    Classifier,
    DecoderConfig,
    DecoderLM,
    EncoderConfig,
    PairClassifier,
    Regressor,
    RegressorConfig,
)

_TOKENS, _PAIRS = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1, 2, 1), jnp.int32)


class LoadedRun(NamedTuple):
    """A trained network.

    Attributes:
      model: the Flax module. variables: what `model.apply` takes: {"params": ...}, float32.
      step: the step of the checkpoint. config: what config.json holds.
    """

    model: Any
    variables: dict[str, Any]
    step: int
    config: dict[str, Any]


def load_run(workdir: str | os.PathLike[str], checkpoint: str | int = "best") -> LoadedRun:
    """Reads a network that `train.lm`, `train.lra`, `train.recall`, `train.regression` or `train.forecast` trained.

    Args:
      workdir: the run's folder, with config.json and checkpoints.
      checkpoint: "best" (that of the best evaluation while training, else the last), "last", or a step.

    Raises:
      ImportError: the extra `train` is not installed.
      FileNotFoundError: there is no such run or checkpoint.
      ValueError: config.json is damaged, or of a task that this function does not know.
    """
    try:
        import orbax.checkpoint as ocp
        from etils import epath
    except ImportError as error:
        raise ImportError("brl_jax.loading needs Orbax: pip install 'brl-jax[train]'") from error

    def read(step: int, **items: Any) -> Any:
        with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
            return checkpointer.restore(folder / str(step), args=ocp.args.Composite(**items))

    config = json.loads((epath.Path(workdir) / "config.json").read_text())
    model, example = _network(config)
    folder = epath.Path(workdir) / "checkpoints"
    if "://" not in os.fspath(folder):  # epath would take gs://... for a name in the working directory
        folder = folder.resolve()
    steps = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    scores = {}
    if checkpoint == "best":
        metas = {step: read(step, meta=ocp.args.JsonRestore())["meta"] for step in steps}
        scores = {step: meta["score"] for step, meta in metas.items() if meta["score"] is not None}
    chosen = (
        steps[-1:]
        if checkpoint in ("best", "last")
        else [step for step in steps if str(step) == str(checkpoint)]
    )
    if not chosen:
        raise FileNotFoundError(
            f"checkpoint must be best, last or one of {steps}, got {checkpoint!r} in {folder}"
        )
    step = min(scores, key=lambda step: scores[step]) if scores else chosen[0]
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), example)["params"])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    return LoadedRun(
        model, {"params": read(step, params=ocp.args.StandardRestore(like))["params"]}, step, config
    )


def _network(config: Any) -> tuple[Any, jax.ShapeDtypeStruct]:
    """The module of a run's configuration, and the shape of an input."""
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ValueError("config.json must be an object with a part 'model'")
    values = config["model"]
    match config.get("task"):
        case "lm" | "recall" | "forecast_tokens":
            return DecoderLM(configuration(DecoderConfig, values, "model")), _TOKENS
        case "lra":
            encoder = configuration(EncoderConfig, values, "model")
            is_pair = config["data"]["task"] == "retrieval"
            return (PairClassifier(encoder), _PAIRS) if is_pair else (Classifier(encoder), _TOKENS)
        case "regression" | "forecast":
            regressor = configuration(RegressorConfig, values, "model")
            return Regressor(regressor), jax.ShapeDtypeStruct((1, 2, regressor.num_inputs), jnp.float32)
    raise ValueError(f"config.json is of the task {config.get('task')!r}, which load_run does not know")
