"""Reads decoders of Hugging Face's transformers (safetensors and config.json) as `DecoderLM`, and writes them.

    from brl_jax import generate
    from brl_jax.models import DecoderLM, huggingface

    config, params = huggingface.load("path/to/model")
    generate(DecoderLM(config), {"params": params}, prompts, max_new_tokens=64, temperature=0)
    huggingface.save("path/to/copy", config, params)

docs/huggingface.md lists the architectures and their options. Needs the extra `hf`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import traverse_util
from jax.sharding import NamedSharding, PartitionSpec

from brl_jax.layers.core.modules import LORA
from brl_jax.models.config import ComputationType
from brl_jax.models.decoder import DecoderConfig, DecoderLM
from brl_jax.models.huggingface.architectures import ARCHITECTURES, Architecture, architecture_of, text_part
from brl_jax.models.huggingface.configs import TOKEN_IDS, PretrainedConfig, read_config, write_config
from brl_jax.models.huggingface.files import CONFIG, GENERATION, open_tensors, read_json, write_folder
from brl_jax.models.huggingface.weights import check_tensors, has_own_head, parts, to_parameters, to_tensors
from brl_jax.models.lora import merged

_TOKEN = jax.ShapeDtypeStruct((1, 1), jnp.int32)

__all__ = ["ARCHITECTURES", "PretrainedConfig", "load", "load_config", "load_onto", "save"]


def load(
    path: str | os.PathLike[str], *, dtype: ComputationType = "float32"
) -> tuple[PretrainedConfig, dict[str, Any]]:
    """Reads a decoder that transformers saved with `model.save_pretrained(path)`, or any folder with that layout.

    Args:
      path: a folder with config.json and model.safetensors, or shards and their index.
      dtype: of the computation. Parameters become float32, whatever the file holds.

    Returns:
      The configuration and the parameters, for `DecoderLM(config).apply({"params": params}, tokens)`. The
      configuration keeps the token ids and generation_config.json, and `save` writes them.

    Raises:
      ImportError: the extra `hf` is not installed.
      FileNotFoundError: the folder or one of its files does not exist.
      ValueError: the architecture or an option is not supported, or the weights do not fit config.json.
    """
    with _opened(path, dtype) as (config, architecture, read):
        return config, jax.tree.map(jnp.asarray, to_parameters(config, architecture, read))


def load_config(path: str | os.PathLike[str], *, dtype: ComputationType = "float32") -> PretrainedConfig:
    """Reads the configuration of a decoder as `load` does, and checks that the folder has its weights.

    config = huggingface.load_config("path/to/model")
    params = huggingface.load_onto(params, "path/to/model")  # of DecoderLM(config).init, also on a mesh
    """
    with _opened(path, dtype) as (config, *_):
        return config


def load_onto(params: Mapping[str, Any], path: str | os.PathLike[str]) -> dict[str, Any]:
    """Puts a folder's weights where a network's parameters are: on one device, or divided over a mesh.

    The host holds one tensor of the folder at a time. The devices hold no second copy, so `params` cannot be used
    afterwards. Low-rank changes (`lora_rank`) stay as they are.

    Args:
      params: unboxed arrays, as `DecoderLM(load_config(path)).init` makes them.
      path: the folder.

    Raises:
      ImportError, FileNotFoundError: as `load`. ValueError: as `load`, or the parameters are of another network.
    """
    leaves = traverse_util.flatten_dict(dict(params))
    with _opened(path, "float32") as (config, architecture, read):
        shapes = nn.unbox(jax.eval_shape(DecoderLM(config).init, jax.random.key(0), _TOKEN)["params"])
        expected = {place: leaf.shape for place, leaf in traverse_util.flatten_dict(shapes).items()}
        if expected != {place: leaf.shape for place, leaf in leaves.items() if place[-1] not in LORA}:
            raise ValueError(f"params must be of the network that {os.fspath(path)} describes")
        for place, repeat, part in parts(config, architecture, read):
            leaf = leaves[place]
            part, sharding = part.astype(leaf.dtype), leaf.sharding
            if repeat is None:
                leaves[place] = _placed(part, sharding)
                continue
            if isinstance(sharding, NamedSharding):  # the axis of the layers is whole
                sharding = NamedSharding(sharding.mesh, PartitionSpec(*sharding.spec[1:]))
            leaves[place] = _setter(leaf.sharding)(leaf, _placed(part, sharding), repeat)
    return traverse_util.unflatten_dict(leaves)


def _placed(array: np.ndarray, sharding: jax.sharding.Sharding) -> jax.Array:
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


@functools.cache
def _setter(sharding: jax.sharding.Sharding) -> Any:
    """(stack, layer's array, its place) -> the stack with the array there, in the same memory."""
    update = functools.partial(jax.lax.dynamic_update_index_in_dim, axis=0)
    return jax.jit(update, donate_argnums=0, out_shardings=sharding)


@contextlib.contextmanager
def _opened(
    path: str | os.PathLike[str], dtype: ComputationType
) -> Iterator[tuple[PretrainedConfig, Architecture, Callable[[str], np.ndarray]]]:
    """The configuration of a folder, its architecture, and a function that reads one of its tensors."""
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"path must be a folder on this machine, with {CONFIG} and the weights; nothing is downloaded. Got {path!r}"
        )
    values = text_part(read_json(folder / CONFIG))
    generation = folder / GENERATION
    config = PretrainedConfig(
        **vars(read_config(values, dtype)),
        model_type=values["model_type"],
        token_ids={name: values[name] for name in TOKEN_IDS if name in values},
        generation=read_json(generation) if generation.is_file() else None,
        max_length=values.get("max_position_embeddings"),
    )
    with open_tensors(folder) as (shapes, read):
        architecture = architecture_of(values)
        if has_own_head(config, architecture, shapes, read):
            config = dataclasses.replace(config, tied_embeddings=False)
        yield config, architecture, check_tensors(config, architecture, shapes, read)


def save(
    path: str | os.PathLike[str],
    config: DecoderConfig,
    params: Mapping[str, Any],
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    dtype: ComputationType = "float32",
    max_length: int | None = None,
) -> str:
    """Writes a decoder in the layout of transformers, for `AutoModelForCausalLM.from_pretrained(path)`.

    Args:
      path: a new folder. It appears once it is complete.
      config, params: of a `DecoderLM`, for example from `load` or from training. Low-rank changes are added to the
        weights.
      tokenizer: a folder whose tokenizer files are copied.
      dtype: of the weights in the file.
      max_length: the value of max_position_embeddings in config.json; by default what the folder that `load` read has,
        else 8,192, or with scaled rotary frequencies (llama3, yarn) the original length times the factor. Some releases
        of transformers derive YaRN's factor from these two lengths.

    Returns:
      The `model_type` that was written.

    Raises:
      ImportError: the extra `hf` is not installed.
      FileExistsError: the folder exists and is not empty.
      OSError: a file cannot be written.
      ValueError: no supported architecture computes this network, or the parameters do not fit the configuration.

    If no supported architecture scales its embeddings as this network does, the table is written twice, once scaled.
    """
    config, params = merged(config, nn.unbox(params))
    if max_length is None and isinstance(config, PretrainedConfig):
        max_length = config.max_length
    try:
        kind, values = write_config(config, max_length)
    except ValueError as error:
        config, params = _untied(config, params)
        try:
            kind, values = write_config(config, max_length)
        except ValueError:
            raise error from None
    stored = jnp.dtype(dtype)
    tensors = {
        name: tensor.astype(stored)
        for name, tensor in to_tensors(config, ARCHITECTURES[kind], params).items()
    }
    values["torch_dtype"] = dtype
    # Without an id transformers would take its architecture's default, which is another token here.
    kept_ids = config.token_ids if isinstance(config, PretrainedConfig) else {}
    values |= {**dict.fromkeys(TOKEN_IDS), **kept_ids}
    generation = config.generation if isinstance(config, PretrainedConfig) else None
    write_folder(
        path,
        tensors,
        values,
        metadata={"format": "pt"},  # the only format that transformers reads
        tokenizer=tokenizer,
        more={} if generation is None else {GENERATION: generation},
    )
    return kind


def _untied(config: DecoderConfig, params: Mapping[str, Any]) -> tuple[DecoderConfig, dict[str, Any]]:
    """Returns the same network without an embedding scale: one scaled table for inputs, one plain table for logits."""
    if config.mup_base_width is not None or "embedding" not in params:
        return config, dict(params)
    scale = math.sqrt(config.d_model) if config.embedding_scale is None else config.embedding_scale
    table = np.asarray(params["embedding"], np.float32)
    return (
        dataclasses.replace(config, tied_embeddings=False, embedding_scale=1.0),
        {**params, "embedding": table * scale, "unembedding": params.get("unembedding", table)},
    )
