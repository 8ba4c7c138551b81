"""Reads decoders of Hugging Face's transformers (safetensors and config.json) as `DecoderLM`, and writes them.

    from brl_jax import generate
    from brl_jax.models import DecoderLM, huggingface

    config, params = huggingface.load("path/to/model")
    generate(DecoderLM(config), {"params": params}, prompts, max_new_tokens=64, temperature=0)
    huggingface.save("path/to/copy", config, params)

docs/huggingface.md lists the architectures and their options. Needs the extra `hf`.
"""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.models.config import ComputationType
from brl_jax.models.decoder import DecoderConfig
from brl_jax.models.huggingface.architectures import ARCHITECTURES, architecture_of, text_part
from brl_jax.models.huggingface.configs import TOKEN_IDS, PretrainedConfig, read_config, write_config
from brl_jax.models.huggingface.files import CONFIG, GENERATION, open_tensors, read_json, write_folder
from brl_jax.models.huggingface.weights import has_own_head, to_parameters, to_tensors

__all__ = ["ARCHITECTURES", "PretrainedConfig", "load", "save"]


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
    )
    with open_tensors(folder) as (names, read):
        architecture = architecture_of(values)
        if has_own_head(config, architecture, names, read):
            config = dataclasses.replace(config, tied_embeddings=False)
        params = to_parameters(config, architecture, names, read)
    return config, jax.tree.map(jnp.asarray, params)


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
      config, params: of a `DecoderLM`, for example from `load` or from training.
      tokenizer: a folder whose tokenizer files are copied.
      dtype: of the weights in the file.
      max_length: the value of max_position_embeddings in config.json; by default 8,192, or with scaled rotary
        frequencies (llama3, yarn) the original length times the factor. Some releases of transformers derive YaRN's
        factor from these two lengths.

    Returns:
      The `model_type` that was written.

    Raises:
      ImportError: the extra `hf` is not installed.
      FileExistsError: the folder exists and is not empty.
      ValueError: no supported architecture computes this network, or the parameters do not fit the configuration.

    If no supported architecture scales its embeddings as this network does, the table is written twice, once scaled.
    """
    params = nn.unbox(params)
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
