"""Reads trained networks without the training code: `load_run` reads a run's folder (extra `train`), `load_export` a
folder that `python -m eval.export` or transformers wrote (extra `hf`)."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from brl_jax.configuration import configuration
from brl_jax.models import (
    Classifier,
    DecoderConfig,
    DecoderLM,
    EncoderConfig,
    EncoderDecoder,
    EncoderDecoderConfig,
    PairClassifier,
    Regressor,
    RegressorConfig,
    huggingface,
)
from brl_jax.models.config import ComputationType
from brl_jax.models.huggingface import files

_TOKENS, _PAIRS = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1, 2, 1), jnp.int32)


class LoadedRun(NamedTuple):
    """A trained network.

    Attributes:
      model: the Flax module.
      variables: {"params": ...} in float32, for `model.apply`.
      step: the checkpoint's step; None if the folder does not record it.
      config: the contents of config.json.
    """

    model: Any
    variables: dict[str, Any]
    step: int | None
    config: dict[str, Any]


def load_run(workdir: str | os.PathLike[str], checkpoint: str | int = "best") -> LoadedRun:
    """Reads a network that train.lm, train.lra, train.recall, train.copy, train.regression or train.forecast trained.

        run = load_run("runs/lm")
        logits, _ = run.model.apply(run.variables, tokens)

    Args:
      workdir: the run's folder, with config.json and checkpoints.
      checkpoint: "best" (by the evaluations during training; "last" if there were none), "last", or a step. Damaged
        checkpoints are skipped: "last" falls back to the newest readable one.

    Raises:
      ImportError: the extra `train` is not installed.
      FileNotFoundError: the run or the checkpoint does not exist.
      ValueError: config.json or the checkpoint is damaged, or the run's task is not supported here.
    """
    try:
        import orbax.checkpoint as ocp
        from etils import epath
    except ImportError as error:
        raise ImportError("brl_jax.loading needs Orbax: pip install 'brl-jax[train]'") from error

    def read(step: int, **items: Any) -> Any:
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
                return checkpointer.restore(folder / str(step), args=ocp.args.Composite(**items))
        except Exception as error:  # storage backends raise many types
            raise ValueError(f"checkpoint {folder / str(step)} cannot be read: {error}") from error

    path = epath.Path(workdir) / "config.json"
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise ValueError(f"{path} is not a complete JSON file: {error}") from error
    model, inputs = _network(config)
    folder = epath.Path(workdir) / "checkpoints"
    if "://" not in os.fspath(folder):  # resolving would turn gs://... into a name in the working directory
        folder = folder.resolve()
    steps = sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    scores: dict[int, float] = {}
    if checkpoint == "best":
        for step in steps:
            with contextlib.suppress(ValueError, KeyError):
                score = read(step, meta=ocp.args.JsonRestore())["meta"]["score"]
                scores |= {} if score is None else {step: score}
    chosen = (
        steps[::-1]
        if checkpoint in ("best", "last")
        else [step for step in steps if str(step) == str(checkpoint)]
    )
    if not chosen:
        raise FileNotFoundError(
            f"checkpoint must be best, last or one of {steps}, got {checkpoint!r} in {folder}"
        )
    if scores:
        chosen = [min(scores, key=lambda step: scores[step])]
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)

    def load(step: int) -> LoadedRun:
        params = read(step, params=ocp.args.StandardRestore(like))["params"]
        return LoadedRun(model, {"params": params}, step, config)

    for step in chosen[:-1]:
        with contextlib.suppress(ValueError):
            return load(step)
    return load(chosen[-1])


def load_export(path: str | os.PathLike[str]) -> LoadedRun:
    """Reads a network that `python -m eval.export` wrote, or a decoder in the layout of transformers.

        run = load_export("path/to/export")
        logits, _ = run.model.apply(run.variables, tokens)

    Args:
      path: a folder with config.json and safetensors; see docs/huggingface.md.

    Raises:
      ImportError: the extra `hf` is not installed.
      FileNotFoundError: a file is missing.
      ValueError: config.json is damaged or describes a network that this version does not know, or the weights do not
        fit it.
    """
    folder = Path(path)
    config = files.read_json(folder / files.CONFIG)
    if "model_type" in config:
        decoder, params = huggingface.load(folder)
        return LoadedRun(DecoderLM(decoder), {"params": params}, None, config)
    model, inputs = _network(config)
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"])
    expected = traverse_util.flatten_dict(shapes, sep=".")
    with files.open_tensors(folder) as (names, read):
        if set(names) != set(expected):
            differing = sorted(set(names) ^ set(expected))
            raise ValueError(f"the weights in {folder} do not match config.json: {', '.join(differing[:5])}")
        leaves = {name: jnp.asarray(read(name), shape.dtype) for name, shape in expected.items()}
        step = files.metadata(folder).get("step")
    for name, leaf in leaves.items():
        if leaf.shape != expected[name].shape:
            raise ValueError(
                f"{name} must have the shape {expected[name].shape}, got {leaf.shape} in {folder}"
            )
    params = traverse_util.unflatten_dict(leaves, sep=".")
    return LoadedRun(model, {"params": params}, None if step is None else int(step), config)


def save_export(
    path: str | os.PathLike[str],
    params: Any,
    config: Mapping[str, Any],
    *,
    step: int,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: ComputationType = "float32",
) -> None:
    """Writes a run's network as safetensors, named after its parameters, for `load_export`.

    Args:
      path: a new folder. It appears once it is complete.
      params, config, step: the parameters, the contents of config.json, and the checkpoint's step.
      tokenizer: a folder whose tokenizer files are copied.
      dtype: of the weights in the file.

    Raises:
      ImportError: the extra `hf` is not installed.
      FileExistsError: the folder exists and is not empty.
      ValueError: `load_export` does not support networks of the run's task.
    """
    _network(config)
    flat = traverse_util.flatten_dict(nn.unbox(params), sep=".")
    tensors = {name: np.ascontiguousarray(np.asarray(leaf).astype(dtype)) for name, leaf in flat.items()}
    metadata = {"format": "brl_jax", "step": str(step)}
    files.write_folder(path, tensors, config, metadata=metadata, tokenizer=tokenizer)


def _network(config: Any) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """Returns the module of a run's configuration, and the shapes of its inputs."""
    if not isinstance(config, dict) or not isinstance(config.get("model"), dict):
        raise ValueError("config.json must be an object with a part 'model'")
    values = config["model"]
    match config.get("task"):
        case "lm" | "recall" | "forecast_tokens":
            return DecoderLM(configuration(DecoderConfig, values, "model")), (_TOKENS,)
        case "lra":
            encoder = configuration(EncoderConfig, values, "model")
            is_pair = config["data"]["task"] == "retrieval"
            return (PairClassifier(encoder), (_PAIRS,)) if is_pair else (Classifier(encoder), (_TOKENS,))
        case "regression" | "forecast":
            regressor = configuration(RegressorConfig, values, "model")
            return Regressor(regressor), (jax.ShapeDtypeStruct((1, 2, regressor.num_inputs), jnp.float32),)
        case "copy":
            pair = configuration(EncoderDecoderConfig, values, "model")
            return EncoderDecoder(pair), (_TOKENS, _TOKENS)
    raise ValueError(
        f"config.json is of the task {config.get('task')!r}, which can be trained and evaluated, but not loaded or "
        "exported"
    )
