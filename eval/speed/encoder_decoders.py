"""Encoder-decoders that copy: a training step, in the setting of BRL-Attention's figure 5 (OpenReview Vpyg3fqXbl).

One layer of encoder and eight of decoder, as in the presets `figure5-NAME` of `train.copy`, on sources of exactly the
sequence length. The training step is the one of `train.copy`: forward and backward pass and the optimiser. Width, heads
and batch are those of the options; the paper has 8 heads of 64 and a batch of 16 (--heads 8 --head_dim 64 --batch 16).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import TYPE_CHECKING

from brl_jax.layers import LinformerConfig
from eval.speed.classifiers import candidate
from eval.speed.measure import Candidate, Case
from train.engine.mesh import open_mesh
from train.tasks.copy import COPY
from train.tasks.copy_config import PRESETS, CopyConfig

if TYPE_CHECKING:
    from eval.speed.options import SpeedOptions

_PREFIX = "figure5-"
NAMES = tuple(preset.removeprefix(_PREFIX) for preset in PRESETS if preset.startswith(_PREFIX))


def cases(options: SpeedOptions, length: int) -> list[Case]:
    """The named networks at one length, on the same inputs."""
    made = []
    for name in NAMES:
        if name not in options.mechanisms:
            continue
        config = _config(_PREFIX + name, options, length)
        model = config.model
        linear = model.cross_window is not None and all(
            mechanism.linear_cost for mechanism in (*model.mechanisms, *model.encoder.mechanisms)
        )
        made.append(Case(name, 1 if linear else 2, functools.partial(_make, config)))
    return made


def _config(preset: str, options: SpeedOptions, length: int) -> CopyConfig:
    config = PRESETS[preset]
    width = options.heads * options.head_dim
    encoder = config.model.encoder_mechanism
    if isinstance(encoder, LinformerConfig):
        encoder = dataclasses.replace(encoder, max_length=length)
    model = dataclasses.replace(
        config.model,
        d_model=width,
        num_heads=options.heads,
        d_ff=4 * width,
        encoder_mechanism=encoder,
        dtype=options.dtype,
    )
    data = dataclasses.replace(config.data, length=(length,), min_length=length)
    loop = dataclasses.replace(config.loop, batch=options.batch)
    return COPY.sized(dataclasses.replace(config, model=model, data=data, loop=loop))


def _make(config: CopyConfig) -> Candidate:
    mesh = open_mesh(config.mesh, config.loop, config.model)
    batch = next(iter(COPY.training_stream(config, None, mesh)))
    return candidate(COPY, config, batch, inference=False)
