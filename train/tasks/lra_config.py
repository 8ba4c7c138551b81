"""The configuration of a Long Range Arena run, and its presets: each task at a size for two CPU cores, and the papers'.

lra-TASK-full, -local, -brl-64, -brl-128, -brl-256   BRL-Attention's own implementation (OpenReview Vpyg3fqXbl, table
                                                     12), trained as in Amos et al. 2023 (arXiv:2310.02980)
lra-TASK-original, lra-TASK-original-NAME            the first Long Range Arena's Transformer (tables 11 and 1)
lra-TASK-transnormer-NAME                            TransNormer (arXiv:2210.10340), and the rows of its table 6 in
                                                     Skyformer's network (arXiv:2111.00035)

docs/presets.md has the source of each setting.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Annotated, Any, NamedTuple, TypeVar

from brl_jax.fields import Natural
from brl_jax.layers import (
    BRLConfig,
    CosformerConfig,
    FlashConfig,
    FlowformerConfig,
    FullConfig,
    GAUConfig,
    InformerConfig,
    KernelizedConfig,
    LinearConfig,
    LinformerConfig,
    LocalConfig,
    LongShortConfig,
    LunaConfig,
    Mechanism,
    NystromformerConfig,
    PerformerConfig,
    ReformerConfig,
    SinkhornConfig,
    SkyformerConfig,
    SliceformerConfig,
    SynthesizerConfig,
)
from brl_jax.models import EncoderConfig
from brl_jax.models.transnormer import TRANSNORMER_SIZES, Variant, transnormer
from train.data.lra.listops import ListOpsSpec
from train.data.lra.tasks import LraDataConfig
from train.engine.config import LoopConfig
from train.engine.errors import UserError
from train.engine.fields import Decided, Flat
from train.engine.optimizer import OptimizerConfig
from train.tasks.run_config import RunConfig


@dataclasses.dataclass(frozen=True)
class LraModelConfig(EncoderConfig):
    """The network."""

    vocab_size: Decided[int] = 256
    num_classes: Decided[int] = 2
    max_length: Decided[int] = 1024


@dataclasses.dataclass(frozen=True)
class TaskDataConfig(LraDataConfig):
    """The examples."""

    # The preset's: its other settings are for this task.
    task: Decided[str] = "listops"


@dataclasses.dataclass(frozen=True)
class LraConfig(RunConfig):
    """An encoder trained to classify the sequences of one task."""

    data: Annotated[TaskDataConfig, Flat]
    model: Annotated[LraModelConfig, Flat]
    pretrained: str = ""
    """Folder of a run of train.lra, a classifier or a run of denoise-TASK or trace-pathfinder, with the same network;
    training starts from its encoder's weights, and from its head's where it classifies the same task."""
    checkpoint: str = "best"
    """Of that run: best (on held-out data), last, or a step."""
    fit_head: Natural = 0
    """Number of training examples to fit the head to before training, as a linear map from the pooled outputs of the
    encoder, pretrained (arXiv:2202.10054) or random; 0: the head starts at random."""

    def without_effect(self) -> dict[str, str]:
        unused = {} if self.pretrained else {"checkpoint": "without pretrained"}
        return super().without_effect() | unused


_Part = TypeVar("_Part")


def recast(kind: type[_Part], part: Any, **changes: Any) -> _Part:
    """A part of a configuration as `kind`, a class derived from its own, with some of its fields changed."""
    return kind(**{field.name: getattr(part, field.name) for field in dataclasses.fields(part)} | changes)


_Model = TypeVar("_Model", bound=EncoderConfig)


def for_rows(data: LraDataConfig, model: _Model, **changes: Any) -> _Model:
    """A network for the rows of a task, with some fields changed. Mechanisms whose settings follow the length take that
    of the longest bucket, so that a sequence is read alike in every bucket.
    """
    _check_grid(data, model)
    longest = data.padded_lengths[-1]
    with_class_token = longest + (model.pooling == "cls")
    return dataclasses.replace(model.for_training(with_class_token), max_length=longest, **changes)


def _check_grid(data: LraDataConfig, model: EncoderConfig) -> None:
    for name in ("mechanism", "late_mechanism"):
        mechanism = getattr(model, name)
        in_a_grid = getattr(mechanism, "pattern", None) in ("axial", "neighbourhood")
        if in_a_grid and data.side is not None and mechanism.grid_width != data.side:
            raise UserError(
                f"--{name}.grid_width: expected {data.side}, the pixels in a row of an image, "
                f"got {mechanism.grid_width}"
            )


class _Setting(NamedTuple):
    """A row of a table: depth, features, heads, width of the feed-forward network, batch, pooling, learning rate."""

    layers: int
    d_model: int
    heads: int
    d_ff: int
    batch: int
    pooling: Any
    learning_rate: float


# Table 12.
_OURS = {
    "listops": _Setting(6, 512, 8, 1024, 64, "mean", 1e-4),
    "text": _Setting(6, 512, 8, 1024, 64, "mean", 1e-4),
    "retrieval": _Setting(4, 128, 8, 512, 16, "mean", 5e-4),
    "image": _Setting(3, 64, 8, 128, 16, "max", 5e-4),
    "pathfinder": _Setting(4, 128, 8, 128, 16, "mean", 5e-4),
    "pathx": _Setting(4, 128, 8, 128, 32, "max", 5e-4),
}
# Table 11.
_ORIGINAL = {
    "listops": _Setting(4, 512, 8, 1024, 32, "cls", 5e-2),
    "text": _Setting(6, 256, 8, 1024, 32, "cls", 5e-2),
    "retrieval": _Setting(4, 128, 4, 512, 32, "cls", 5e-2),
    "image": _Setting(1, 128, 8, 128, 256, "cls", 5e-4),
    "pathfinder": _Setting(4, 32, 4, 32, 512, "mean", 1e-3),
    "pathx": _Setting(2, 32, 4, 32, 32, "cls", 1e-3),
}
# Batch, learning rate and warm-up of TransNormer and Skyformer, which have no results on path-x.
_TRANSNORMER = {
    "listops": (32, 1e-4, 1_000),
    "text": (16, 1e-4, 80),
    "retrieval": (16, 2e-4, 800),
    "image": (256, 1e-4, 175),
    "pathfinder": (128, 2e-4, 312),
}
_LENGTHS = {
    "listops": 2000,
    "text": 4000,
    "retrieval": 4000,
    "image": 1024,
    "pathfinder": 1024,
    "pathx": 16384,
}
_OF_PIXELS = ("image", "pathfinder", "pathx")
_EXAMPLES = {
    "listops": 96_000,
    "text": 25_000,
    "retrieval": 147_086,
    "image": 45_000,
    "pathfinder": 160_000,
    "pathx": 160_000,
}
"""Training examples of the Long Range Arena."""


def _data(task: str) -> TaskDataConfig:
    return TaskDataConfig(task=task, length=_LENGTHS[task], resolution=128 if task == "pathx" else 32)


def _loop(steps: int, batch: int, eval_every: int) -> LoopConfig:
    return LoopConfig(
        steps=steps, batch=batch, eval_every=eval_every, checkpoint_every=eval_every, keep_checkpoints=1
    )


class _Schedule(NamedTuple):
    """How Amos et al. train on a task: passes over its examples, steps of the warm-up, decay of the weights."""

    epochs: int
    warmup: int
    weight_decay: float


# experiment/lra/transformer-lra-TASK.yaml of their code.
_AMOS = {
    "listops": _Schedule(100, 2_000, 0.0),
    "text": _Schedule(65, 2_000, 0.1),
    "retrieval": _Schedule(32, 5_000, 0.0),
    "image": _Schedule(200, 2_000, 0.0),
    "pathfinder": _Schedule(200, 5_000, 0.0),
    "pathx": _Schedule(200, 5_000, 0.0),
}


def _paper(task: str, mechanism: Mechanism) -> LraConfig:
    """An evaluation after every pass. BRL-Attention keeps its own feed-forward network (equation 5)."""
    s, schedule = _OURS[task], _AMOS[task]
    a_pass = math.ceil(_EXAMPLES[task] / s.batch)
    is_brl = isinstance(mechanism, BRLConfig)
    model = LraModelConfig(
        num_layers=s.layers,
        d_model=s.d_model,
        num_heads=s.heads,
        d_ff=s.d_ff,
        ffn="glu_relu" if is_brl else "gelu",
        use_bias=not is_brl,
        mechanism=mechanism,
        pooling=s.pooling,
        inputs="scale" if task in _OF_PIXELS else "embed",
    )
    optimizer = OptimizerConfig(
        learning_rate=s.learning_rate,
        warmup_steps=schedule.warmup,
        decay="cosine" if task == "text" else "constant",
        final_share=0.0,
        beta2=0.999,
        weight_decay=schedule.weight_decay,
        clip_norm=0.0,
    )
    return LraConfig(_loop(schedule.epochs * a_pass, s.batch, a_pass), _data(task), model, optimizer)


# Steps and warm-up of the Long Range Arena's release on texts; on images it has 200 passes and warms up in the first.
_RELEASED = {"listops": (5_000, 1_000), "text": (20_000, 8_000), "retrieval": (5_000, 8_000)}


def _original(task: str, mechanism: Mechanism) -> LraConfig:
    """Sinusoidal positions, learned ones on images and path-x, and plain feed-forward networks. On texts the learning
    rate is divided by the square root of the warm-up's steps, as the release's schedule does."""
    s = _ORIGINAL[task]
    model = LraModelConfig(
        num_layers=s.layers,
        d_model=s.d_model,
        num_heads=s.heads,
        d_ff=s.d_ff,
        ffn="gelu",
        use_bias=True,
        mechanism=mechanism,
        pooling=s.pooling,
        positions="learned" if task in ("image", "pathx") else "sinusoidal",
        dropout=0.3 if task == "image" else 0.1,
    )
    if task in _OF_PIXELS:
        warmup = _EXAMPLES[task] // s.batch
        steps, rate, weight_decay = 200 * warmup, s.learning_rate, 0.0
    else:
        steps, warmup = _RELEASED[task]
        rate, weight_decay = s.learning_rate * warmup**-0.5, 0.1
    optimizer = OptimizerConfig(
        learning_rate=rate,
        warmup_steps=warmup,
        decay="cosine" if task in _OF_PIXELS else "inverse_sqrt",
        final_share=0.0,
        beta2=0.98,
        epsilon=1e-9,
        weight_decay=weight_decay,
        clip_norm=1.0 if task == "pathx" else 0.0,
    )
    return LraConfig(_loop(steps, s.batch, 1_000), _data(task), model, optimizer)


def _of_skyformer(task: str, model: LraModelConfig) -> LraConfig:
    """50,000 steps with a learning rate that falls linearly to 0, without weight decay."""
    batch, learning_rate, warmup = _TRANSNORMER[task]
    loop = _loop(50_000, batch, 1_000)
    optimizer = OptimizerConfig(
        learning_rate=learning_rate,
        warmup_steps=warmup,
        decay="linear",
        final_share=0.0,
        beta2=0.999,
        epsilon=1e-6,
        weight_decay=0.0,
    )
    return LraConfig(loop, _data(task), model, optimizer)


def _transnormer(task: str, variant: Variant) -> LraConfig:
    """Learned positions, and pixels as tokens."""
    model = transnormer(variant, LraModelConfig, positions="learned", dropout=0.1, **TRANSNORMER_SIZES["lra"])
    return _of_skyformer(task, model)


def _reformer(task: str) -> ReformerConfig:
    """With the rounds, chunks and buckets of Skyformer's code."""
    buckets = 2 ** int(math.log2(2 * (_LENGTHS[task] // 64)))
    return ReformerConfig(num_rounds=2, num_buckets=buckets, chunk_size=64)


def _beside_transnormer(task: str) -> dict[str, Mechanism]:
    """The mechanisms of TransNormer's table 6 at the sizes of Skyformer's code (arXiv:2111.00035), by name. Informer's
    factor is the one by which that code comes to 128 keys; the Long-Short Transformer has the window and the rank of
    its paper's results on the Long Range Arena (arXiv:2107.02192). That code has neither cosFormer nor FLASH.
    """
    factor = math.ceil(128 / math.log(_LENGTHS[task]))
    return {
        "full": FullConfig(dropout=0.1),
        "linformer": LinformerConfig(num_projected=128, max_length=_LENGTHS[task]),
        "performer": PerformerConfig(num_features=128),
        "bigbird": LocalConfig(window=64, pattern="bigbird"),
        "cosformer": CosformerConfig(max_length=_LENGTHS[task]),
        "flash-quad": GAUConfig(),
        "flash": FlashConfig(),
        "nystromformer": NystromformerConfig(num_landmarks=128),
        "kernelized": KernelizedConfig(),
        "skyformer": SkyformerConfig(num_samples=128),
        "informer": InformerConfig(factor=factor),
        "reformer": _reformer(task),
        "long-short": LongShortConfig(window=8, num_projected=32),
    }


def _skyformer(task: str, mechanism: Mechanism) -> LraConfig:
    """Learned positions, pixels as tokens, and plain feed-forward networks."""
    model = LraModelConfig(
        num_layers=2,
        d_model=64,
        num_heads=2,
        d_ff=128,
        ffn="gelu",
        use_bias=True,
        mechanism=mechanism,
        pooling="mean",
        positions="learned",
        dropout=0.1,
    )
    return _of_skyformer(task, model)


def _beside_brl(task: str) -> dict[str, Mechanism]:
    """Mechanisms of BRL-Attention's table 1, by name, with the sizes of the Long Range Arena's code where it has them:
    blocks of 50 in local attention and Sinkhorn, 16 projected tokens. A row has a class token more than its task has
    tokens, the first, which Longformer lets see all others. Sliceformer sorts in ascending order, as in its authors'
    code. Synthesizer has the factorised random weights, Luna the most packed tokens of its paper's results."""
    longest = _LENGTHS[task] + 1
    return {
        "linformer": LinformerConfig(num_projected=16, max_length=longest),
        "linear": LinearConfig(),
        "performer": PerformerConfig(num_features=256),
        "luna": LunaConfig(num_packed=256),
        "cosformer": CosformerConfig(max_length=longest),
        "flowformer": FlowformerConfig(),
        "local": LocalConfig(window=50, pattern="block"),
        "sparse": LocalConfig(window=128, pattern="fixed"),
        "longformer": LocalConfig(window=512, pattern="global", num_global=1),
        "bigbird": LocalConfig(window=64, pattern="bigbird"),
        "sliceformer": SliceformerConfig(order="ascending"),
        "reformer": _reformer(task),
        "sinkhorn": SinkhornConfig(block_size=50, max_length=_LENGTHS[task] + 50),
        "synthesizer": SynthesizerConfig(weights="random", rank=32, max_length=longest),
    }


class _Small(NamedTuple):
    """The settings that make a task small enough for two cores."""

    steps: int
    batch: int
    window: int
    pooling: Any
    data: dict[str, Any]


_SMALL = {
    "listops": _Small(
        1000,
        32,
        16,
        "mean",
        {
            "length": 128,
            "listops": ListOpsSpec(min_tokens=15, max_tokens=129, max_depth=4, max_args=5),
            "train_examples": 20_000,
        },
    ),
    "text": _Small(600, 16, 32, "mean", {"length": 512}),
    "retrieval": _Small(600, 8, 32, "mean", {"length": 512, "train_examples": 8_000}),
    "image": _Small(600, 16, 64, "max", {"length": 1024}),
    "pathfinder": _Small(3000, 32, 64, "mean", {"length": 1024, "train_examples": 16_000}),
    "pathx": _Small(1500, 8, 128, "max", {"length": 4096, "resolution": 64, "train_examples": 4_000}),
}


def _small(task: str) -> LraConfig:
    """Minutes on two CPU cores: two narrow layers, short sequences, images of 64 x 64 for path-x."""
    s = _SMALL[task]
    return LraConfig(
        LoopConfig(steps=s.steps, batch=s.batch, eval_every=200, checkpoint_every=200, keep_checkpoints=1),
        TaskDataConfig(task=task, **s.data),
        LraModelConfig(
            num_layers=2,
            d_model=64,
            num_heads=4,
            d_ff=128,
            mechanism=BRLConfig(window=s.window, num_compressed=s.window, beta=0.5),
            pooling=s.pooling,
            inputs="scale" if task in _OF_PIXELS else "embed",
        ),
        OptimizerConfig(learning_rate=2e-3, warmup_steps=50, beta2=0.98),
    )


def _paths(mechanism: Mechanism) -> LraConfig:
    """Windows in two dimensions for pathfinder: narrow layers, enough for a dot's signal to reach the middle of a
    path, which keep to the lit pixels around each, without positions (docs/lra.md)."""
    config = _small("pathfinder").changed(
        loop={"steps": 400, "batch": 16, "eval_every": 100, "checkpoint_every": 100},
        data={"train_examples": 6_000, "valid_examples": 500},
        model={
            "num_layers": 12,
            "d_model": 16,
            "num_heads": 1,
            "d_ff": 48,
            "positions": "none",
            "mechanism": mechanism,
            "pooling": "mean",
        },
    )
    optimizer = OptimizerConfig(learning_rate=4e-3, warmup_steps=30, beta2=0.98, weight_decay=0.01)
    return dataclasses.replace(config, optimizer=optimizer)


def _brl(size: int) -> BRLConfig:
    return BRLConfig(
        window=size, num_compressed=size, compress_scale="m1", compress_positions="none", beta=0.5
    )


PRESETS: dict[str, LraConfig] = {
    **{task: _small(task) for task in _SMALL},
    "pathfinder-2d": _paths(LocalConfig(window=4, pattern="neighbourhood", grid_width=32)),
    **{f"lra-{task}-full": _paper(task, FullConfig()) for task in _OURS},
    **{f"lra-{task}-local": _paper(task, LocalConfig(window=512)) for task in _OURS},
    **{f"lra-{task}-brl-{size}": _paper(task, _brl(size)) for task in _OURS for size in (64, 128, 256)},
    **{f"lra-{task}-original": _original(task, FullConfig()) for task in _ORIGINAL},
    **{f"lra-{task}-transnormer-t1": _transnormer(task, "t1") for task in _TRANSNORMER},
    **{f"lra-{task}-transnormer-t2": _transnormer(task, "t2") for task in _TRANSNORMER},
    **{
        f"lra-{task}-transnormer-{name}": _skyformer(task, mechanism)
        for task in _TRANSNORMER
        for name, mechanism in _beside_transnormer(task).items()
    },
    **{
        f"lra-{task}-original-{name}": _original(task, mechanism)
        for task in _ORIGINAL
        for name, mechanism in _beside_brl(task).items()
    },
}
