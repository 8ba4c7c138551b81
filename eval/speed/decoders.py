"""Decoders: inference and a training step, in the setting of BRL-Attention's tables 6 and 7 (OpenReview Vpyg3fqXbl).

Six layers of full, local and BRL attention (window and compressed tokens of 128), as in the presets `wikitext103-full`,
`-local` and `-brl` of `train.lm`, on rows of exactly the sequence length. Inference is the loss of a row, without
gradients; the training step is that of `train.lm`: forward and backward pass and the optimiser. Memory is the
compiler's, time is compared with full attention's in the same run. Width, heads and batch are those of the options; the
paper has 8 heads of 64 (--heads 8 --head_dim 64 --lengths 128 256 512 1024 2048 3072 4096).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

import numpy as np

from eval.speed.classifiers import candidate
from eval.speed.measure import Candidate, Case
from train.engine.batch import Batch
from train.tasks.lm import LM
from train.tasks.lm_config import PRESETS, LmConfig

if TYPE_CHECKING:
    from eval.speed.options import SpeedOptions

NAMES = ("full", "local", "brl")


def cases(options: SpeedOptions, length: int) -> list[Case]:
    """The named decoders at one length, on the same inputs."""
    made = []
    for name in NAMES:
        if name in options.mechanisms:
            config = decoder_config(name, options, length)
            growth = 1 if config.model.mechanism.linear_cost else 2
            made.append(Case(name, growth, functools.partial(_make, config)))
    return made


def decoder_config(name: str, options: SpeedOptions, length: int) -> LmConfig:
    """The run of a decoder: its preset's network at the width of the options."""
    preset = PRESETS[f"wikitext103-{name}"]
    width = options.heads * options.head_dim
    model = dataclasses.replace(
        preset.model, d_model=width, num_heads=options.heads, d_ff=4 * width, dropout=0.0, dtype=options.dtype
    )
    loop = dataclasses.replace(preset.loop, batch=options.batch, accumulation=1, length=length)
    return LM.sized(dataclasses.replace(preset, model=model, loop=loop))


def _make(config: LmConfig) -> Candidate:
    rng = np.random.default_rng(0)
    arrays = {
        name: rng.integers(0, config.model.vocab_size, like.shape).astype(like.dtype)
        for name, like in LM.batch_shapes(config, config.loop.batch).items()
    }
    return candidate(LM, config, Batch(arrays))
