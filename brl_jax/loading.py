"""Reads trained networks without the training code: `load_run` reads a run's folder (extra `train`), `load_export` a
folder that `python -m eval.export` or transformers wrote (extra `hf`)."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util

from brl_jax.checkpoints import candidates, read_arrays
from brl_jax.configuration import configuration
from brl_jax.json_files import check_json, read_json
from brl_jax.models import (
    Classifier,
    DecoderLM,
    EncoderDecoder,
    MaskedLM,
    PairClassifier,
    Regressor,
    TokenClassifier,
    huggingface,
)
from brl_jax.models.config import ComputationType
from brl_jax.models.huggingface import files

_TOKENS, _PAIRS = jax.ShapeDtypeStruct((1, 1), jnp.int32), jax.ShapeDtypeStruct((1, 2, 1), jnp.int32)


class LoadedRun(NamedTuple):
    """A trained network.

    Attributes:
      model: the Flax module.
      variables: {"params": ...} in float32, for `model.apply`; matrices that `lora_rank` keeps as they are in the data
        type of the computation.
      step: the checkpoint's step; None if the folder does not record it.
      config: the contents of config.json.
    """

    model: Any
    variables: dict[str, Any]
    step: int | None
    config: dict[str, Any]

    def __repr__(self) -> str:
        number = sum(leaf.size for leaf in jax.tree.leaves(self.variables))
        return f"LoadedRun(model={type(self.model).__name__}, step={self.step}, {number:,} parameters)"


def load_run(workdir: str | os.PathLike[str], checkpoint: str | int = "best") -> LoadedRun:
    """Reads a network that a command of `train` trained.

        run = load_run("runs/small")
        logits, _ = run.model.apply(run.variables, tokens)

    Args:
      workdir: the run's folder, with config.json and checkpoints.
      checkpoint: "best" (the checkpoint with the best evaluation, or the last one if nothing was evaluated), "last", or
        a step. Damaged checkpoints are skipped; "last" falls back to the newest readable one.

    Raises:
      ImportError: the extra `train` is not installed.
      FileNotFoundError: there is no such run or checkpoint.
      ValueError: config.json or the checkpoint is damaged, or its network is not one that can be loaded.
    """
    try:
        import orbax.checkpoint  # noqa: F401
        from etils import epath
    except ImportError as error:
        raise ImportError("brl_jax.loading needs Orbax: pip install 'brl-jax[train]'") from error
    path = epath.Path(workdir) / "config.json"
    try:
        config = read_json(path, {"model": dict})
    except FileNotFoundError as error:
        raise FileNotFoundError(f"workdir: no run there: {os.fspath(path)} is missing") from error
    model, inputs = _network(config)
    folder = epath.Path(workdir) / "checkpoints"
    try:
        steps = candidates(folder, str(checkpoint))
    except LookupError as error:
        raise FileNotFoundError(f"checkpoint: {error}") from error
    here = jax.sharding.SingleDeviceSharding(jax.local_devices()[0])
    shapes = nn.unbox(jax.eval_shape(model.init, jax.random.key(0), *inputs)["params"])
    like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    for step in steps:
        try:
            params = read_arrays(folder, step, {"params": like})["params"]
            return LoadedRun(model, {"params": params}, step, config)
        except Exception as error:  # whatever the storage raises
            reason = " ".join(str(error).split())[:200]
    raise ValueError(f"checkpoint {folder / str(steps[-1])} cannot be read: {reason}")


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
      OSError: a file cannot be written.
      ValueError: `load_export` does not support the run's network.
    """
    _network(config)
    flat = traverse_util.flatten_dict(nn.unbox(params), sep=".")
    tensors = {name: np.ascontiguousarray(np.asarray(leaf).astype(dtype)) for name, leaf in flat.items()}
    metadata = {"format": "brl_jax", "step": str(step)}
    files.write_folder(path, tensors, config, metadata=metadata, tokenizer=tokenizer)


_INPUTS: dict[type, Callable[[Any], tuple[jax.ShapeDtypeStruct, ...]]] = {
    DecoderLM: lambda config: (_TOKENS,),
    Classifier: lambda config: (_TOKENS,),
    PairClassifier: lambda config: (_PAIRS,),
    EncoderDecoder: lambda config: (_TOKENS, _TOKENS),
    MaskedLM: lambda config: (_TOKENS, _TOKENS),
    TokenClassifier: lambda config: (_TOKENS,),
    Regressor: lambda config: (jax.ShapeDtypeStruct((1, 2, config.num_inputs), jnp.float32),),
}
"""The networks that can be loaded, and the shapes of their inputs."""


def _network(config: Any) -> tuple[Any, tuple[jax.ShapeDtypeStruct, ...]]:
    """The module of a run's configuration, which names its class, and the shapes of its inputs."""
    check_json(config, {"model": dict}, "config.json")
    network = next((kind for kind in _INPUTS if kind.__name__ == config.get("network")), None)
    if network is None:
        known = ", ".join(kind.__name__ for kind in _INPUTS)
        raise ValueError(
            f"config.json: network must be one of {known} to be loaded or exported, got {config.get('network')!r}"
        )
    values = configuration(get_type_hints(network)["config"], config["model"], "model")
    return network(values), _INPUTS[network](values)
