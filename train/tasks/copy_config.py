"""The configuration of `train.copy` and its presets."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

from brl_jax.layers import (
    BRLConfig,
    FullConfig,
    LinformerConfig,
    LocalConfig,
    Mechanism,
    PerformerConfig,
    ReformerConfig,
    SynthesizerConfig,
)
from brl_jax.models import EncoderDecoderConfig
from train.data.copying import CopyDataConfig
from train.engine.config import LoopConfig, RunConfig
from train.engine.fields import Decided, Flat
from train.engine.optimizer import OptimizerConfig


@dataclasses.dataclass(frozen=True)
class CopyModelConfig(EncoderDecoderConfig):
    """The network."""

    vocab_size: Decided[int] = 34
    lora_rank: Decided[int] = 0
    lora_alpha: Decided[float] = 16.0


@dataclasses.dataclass(frozen=True)
class CopyConfig(RunConfig):
    """An encoder-decoder trained to write a target to a source."""

    data: Annotated[CopyDataConfig, Flat]
    model: Annotated[CopyModelConfig, Flat]


class _Parts(NamedTuple):
    """The mechanisms of a preset: the decoder's, the encoder's if it differs, and the window between them."""

    mechanism: Mechanism
    encoder: Mechanism | None = None
    cross_window: int | None = None

    @property
    def fields(self) -> dict[str, Any]:
        return {
            "mechanism": self.mechanism,
            "encoder_mechanism": self.encoder,
            "cross_window": self.cross_window,
        }


def _brl(window: int, compressed: int, block: int | None = None, history: int = 512) -> _Parts:
    mechanism = BRLConfig(
        window=window, num_compressed=compressed, block_size=block, history_size=history, beta=0.5
    )
    return _Parts(mechanism, cross_window=window)


def _parts(window: int, projected: int, length: int) -> Mapping[str, _Parts]:
    """The rows of BRL-Attention's table 8 except BRL, at these sizes. What has no causal form (Linformer, ETC,
    BigBird) is in the encoder, with full or local attention in the decoder."""
    local = LocalConfig(window=window)
    grid = max(2, round(length**0.5))
    num_global = max(1, window // 4)
    return {
        "full": _Parts(FullConfig()),
        "local": _Parts(local, cross_window=window),
        "strided": _Parts(LocalConfig(window=grid, pattern="strided")),
        "axial": _Parts(LocalConfig(pattern="axial", grid_width=grid)),
        "etc": _Parts(
            local,
            LocalConfig(window=window, pattern="global_local", num_global=num_global),
            cross_window=window,
        ),
        "bigbird": _Parts(
            local, LocalConfig(window=window, pattern="bigbird", num_global=num_global), cross_window=window
        ),
        "reformer": _Parts(ReformerConfig(num_buckets=max(2, length // window * 2), chunk_size=window)),
        "synthesizer": _Parts(SynthesizerConfig(max_length=4 * length + 2)),
        "performer": _Parts(PerformerConfig()),
        "linformer": _Parts(FullConfig(), LinformerConfig(num_projected=projected, max_length=4 * length)),
    }


def _small(parts: _Parts) -> CopyConfig:
    """Minutes on one CPU core: 2 + 2 layers that copy up to 64 of 32 symbols."""
    return CopyConfig(
        loop=LoopConfig(steps=300, batch=32, eval_every=50, checkpoint_every=100, keep_checkpoints=1),
        data=CopyDataConfig(length=(64,), min_length=16),
        model=CopyModelConfig(
            num_layers=2, encoder_layers=2, d_model=64, num_heads=4, d_ff=128, **parts.fields
        ),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=50, weight_decay=0.0),
    )


def _figure5(parts: _Parts) -> CopyConfig:
    """BRL-Attention, section 3.1 and figure 5: one layer of encoder, eight of decoder, 8 heads, width 512, batch 16,
    and sources of 200 to 2,000 symbols (`--length`). The symbols, steps and learning rate are our choice."""
    return CopyConfig(
        loop=LoopConfig(steps=10_000, batch=16, eval_every=500, checkpoint_every=500),
        data=CopyDataConfig(length=(2000,), min_length=2000),
        model=CopyModelConfig(
            num_layers=8, encoder_layers=1, d_model=512, num_heads=8, d_ff=2048, **parts.fields
        ),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=1_000),
    )


def _paper_sizes() -> dict[str, _Parts]:
    """The networks of figure 5 at its sizes, and the ones of table 8 that it leaves out."""
    others = _parts(100, 128, 2048)
    return {
        **{name: parts for name, parts in others.items() if name not in ("local", "linformer")},
        **{f"linformer-{k}": _parts(100, k, 2048)["linformer"] for k in (64, 128, 256)},
        **{f"local-{w}": _parts(w, 128, 2048)["local"] for w in (50, 100)},
        **{f"brl-{w}-{m}": _brl(w, m) for w in (50, 100) for m in (10, 50, 100)},
    }


_SMALL = {"brl": _brl(8, 16, 16, 64), **_parts(8, 32, 64)}

PRESETS: dict[str, CopyConfig] = {
    **{f"copy-{name}": _small(parts) for name, parts in _SMALL.items()},
    **{f"figure5-{name}": _figure5(parts) for name, parts in _paper_sizes().items()},
}
