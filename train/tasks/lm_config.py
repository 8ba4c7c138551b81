"""The configuration of a language model's run, and its presets: from BRL-Attention (OpenReview Vpyg3fqXbl, tables
13 and 14), TransNormer (arXiv:2210.10340, table 13), MLR attention (arXiv:2509.07963, section 5.1) and TLinFormer
(arXiv:2508.20407, section 6.2), and a small default for any machine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Self

from brl_jax.fields import Length, Natural
from brl_jax.layers import (
    BRLConfig,
    BSBRConfig,
    FlashConfig,
    FullConfig,
    GatedDeltaNetConfig,
    GAUConfig,
    GlobalWindowConfig,
    LinearConfig,
    LocalConfig,
    LongShortConfig,
    Mamba2Config,
    Mechanism,
    MLRConfig,
    PerformerConfig,
    TLinFormerConfig,
)
from brl_jax.models import DecoderConfig
from brl_jax.models.huggingface import load_config
from brl_jax.models.transnormer import TRANSNORMER_SIZES, Variant, transnormer
from brl_jax.sharding import MeshConfig
from train.data.dataset import DataConfig
from train.engine.config import LoopConfig
from train.engine.errors import UserError
from train.engine.fields import Decided, Flat, Free
from train.engine.optimizer import OptimizerConfig
from train.tasks.conversion import OWN, ConvertibleConfig, naming, teacher_of
from train.tasks.decoder_flops import training_flops

# Tokens of WikiText-103's training text in GPT-2's vocabulary, to within a few percent.
_WIKITEXT103_TOKENS = 118_000_000


@dataclasses.dataclass(frozen=True)
class LmLoopConfig(LoopConfig):
    """The loop over a text; each row continues where it stopped in the previous step."""

    length: Length = 512
    """Tokens of a row in one step."""
    eval_tokens: Free[Natural] = 100_000
    """Held-out tokens that an evaluation reads; 0: all."""
    full_eval: Free[bool] = True
    """The evaluation at the end reads all held-out tokens."""

    def __post_init__(self):
        super().__post_init__()
        if self.eval_tokens == 1:
            raise ValueError("eval_tokens must be at least 2, or 0 for all, got 1")

    def without_effect(self) -> dict[str, str]:
        return {} if self.eval_tokens else {"full_eval": "with eval_tokens 0: each evaluation reads all"}


@dataclasses.dataclass(frozen=True)
class LmModelConfig(DecoderConfig):
    """The network."""

    vocab_size: Decided[int] = 256


@dataclasses.dataclass(frozen=True)
class LmConfig(ConvertibleConfig):
    """A decoder trained to predict the next token of a text."""

    task: ClassVar[str] = "lm"

    loop: Annotated[LmLoopConfig, Flat]
    data: Annotated[DataConfig, Flat]
    model: Annotated[LmModelConfig, Flat]
    from_hf: Free[str] = ""
    """Folder of a decoder in the layout of transformers (docs/huggingface.md). A new run takes its network, its
    tokenizer and its weights from it, and does not need it again once it has begun."""
    pretrained: Decided[Mapping[str, Any] | None] = None
    """What `eval.export` writes back of that folder, fields of `PretrainedConfig`."""
    sample_prompt: Free[str] = ""
    """Text that the sample printed at the end continues; empty: the first tokens of the held-out text."""
    sample_tokens: Free[Natural] = 256
    """Tokens of that sample; 0: none."""

    def __post_init__(self):
        if self.model.lora_rank and self.optimizer.optimizer != "adamw":
            raise ValueError(
                f"optimizer must be 'adamw' with lora_rank, got {self.optimizer.optimizer!r}, which moves whole weights"
            )

    def without_effect(self) -> dict[str, str]:
        unused = {} if self.sample_tokens else {"sample_prompt": "with sample_tokens 0"}
        if self.convert_from:
            unused |= {"from_hf": "with convert_from"}
            unused["data.tokenizer"] = "with convert_from, which has a tokenizer"
        elif self.from_hf:
            decided = {field.name for field in dataclasses.fields(self.model)} - _OWN
            unused |= {
                f"model.{name}": "with from_hf, whose config.json describes the network" for name in decided
            }
            unused["data.tokenizer"] = "with from_hf, which has a tokenizer"
        else:
            unused["model.lora_rank"] = "without from_hf: the weights that stay as they are would be random"
        if not self.model.lora_rank:
            unused["model.lora_alpha"] = "with lora_rank 0"
        return super().without_effect() | unused

    def resolved(self) -> Self:
        """With the network and the tokenizer of `from_hf` or `convert_from`."""
        if self.convert_from:
            return self._converted()
        if not self.from_hf:
            return self
        with naming("--from_hf"):
            found = load_config(self.from_hf)
        values = {field.name: getattr(found, field.name) for field in dataclasses.fields(DecoderConfig)}
        try:
            model = LmModelConfig(**values | {name: getattr(self.model, name) for name in _OWN})
        except ValueError as error:
            raise UserError(f"--{error}") from error
        data = self._read_by(_tokenizer_in("--from_hf", self.from_hf))
        return dataclasses.replace(self, model=model, data=data, pretrained=_beyond_network(found))

    def _converted(self) -> Self:
        teacher = teacher_of(self)
        if teacher.run is None:
            tokenizer, kept = (
                _tokenizer_in("--convert_from", self.convert_from),
                _beyond_network(teacher.config),
            )
        else:
            tokenizer, kept = teacher.run.data.tokenizer, teacher.run.pretrained
        return dataclasses.replace(super().resolved(), data=self._read_by(tokenizer), pretrained=kept)

    def _read_by(self, tokenizer: str) -> DataConfig:
        """The data as this tokenizer reads them."""
        made = self.data.data.startswith("tokens:")
        return self.data if made else dataclasses.replace(self.data, tokenizer=tokenizer)


# Fields of a network read from a folder that training decides.
_OWN = OWN | {"lora_rank", "lora_alpha"}


def _beyond_network(found: DecoderConfig) -> dict[str, Any]:
    """The fields of a `PretrainedConfig` that do not describe its network."""
    network = {field.name for field in dataclasses.fields(DecoderConfig)}
    return {name: value for name, value in vars(found).items() if name not in network}


def _tokenizer_in(option: str, folder: str) -> str:
    """The file of a folder's tokenizer."""
    for name in ("tokenizer.json", "tokenizer.model"):
        if (Path(folder) / name).is_file():
            return str(Path(folder) / name)
    raise UserError(f"{option}: {folder} has no tokenizer.json and no tokenizer.model")


def _stdlib(tokenizer: str, mechanism: BRLConfig, learning_rate: float, **loop: Any) -> LmConfig:
    """The standard library's sources, for two CPU cores."""
    return LmConfig(
        loop=LmLoopConfig(length=512, eval_every=125, checkpoint_every=125, **loop),
        data=DataConfig(tokenizer=tokenizer),
        model=LmModelConfig(num_layers=2, d_model=128, num_heads=4, d_ff=256, mechanism=mechanism),
        optimizer=OptimizerConfig(learning_rate=learning_rate, warmup_steps=50),
    )


def long_loop(steps: int, batch: int, **sizes: Any) -> LmLoopConfig:
    """The loop of a paper's run, whose evaluations read all held-out tokens."""
    often: dict[str, Any] = {"eval_every": 2_000, "checkpoint_every": 1_000, "eval_tokens": 0}
    return LmLoopConfig(steps=steps, batch=batch, **often | sizes)


def _paper(mechanism: Mechanism, data: str, *, length: int, batch: int, accumulation: int) -> LmConfig:
    """Six layers of width 512, with nanoGPT's optimiser. The paper does not give the number of steps."""
    return LmConfig(
        loop=long_loop(100_000, batch, accumulation=accumulation, length=length),
        data=DataConfig(data=data, tokenizer="hf:gpt2"),
        model=LmModelConfig(
            num_layers=6, d_model=512, num_heads=8, d_ff=2048, dropout=0.1, mechanism=mechanism
        ),
        optimizer=OptimizerConfig(learning_rate=5e-4, warmup_steps=2_000),
    )


def _wikitext103(mechanism: Mechanism) -> LmConfig:
    data = "hf:Salesforce/wikitext:wikitext-103-raw-v1"
    return _paper(mechanism, data, length=512, batch=64, accumulation=4)


def _openwebtext(mechanism: Mechanism) -> LmConfig:
    return _paper(mechanism, "hf:Skylion007/openwebtext", length=1024, batch=80, accumulation=5)


def _hybrid(mechanism: Mechanism, run: int, other: Mechanism) -> LmConfig:
    """`_openwebtext` with a layer of another mechanism after every `run` layers of the first, twice."""
    layers = {"num_layers": 2 * (run + 1), "early_layers": run}
    return _openwebtext(mechanism).changed(model={**layers, "late_mechanism": other, "schedule": "alternate"})


def _brl(size: int, history: int) -> BRLConfig:
    """Our own form of BRL at the paper's window, m, history, scale and beta: layer memory, blocks as long as the
    window, rotary positions in the compression."""
    return BRLConfig(window=size, num_compressed=size, history_size=history, compress_scale="m1", beta=0.5)


def _brl_paper(size: int, block: int, **changes: Any) -> BRLConfig:
    """Algorithm 1 of BRL-Attention at the sizes of its tables 13 and 14. A block is a row of a batch, and its
    compressed tokens read the network's outputs for the block before."""
    paper = BRLConfig(
        window=size,
        num_compressed=size,
        block_size=block,
        history_size=block,
        memory="output",
        generation="all",
        compress_scale="m1",
        compress_positions="none",
        beta=0.5,
        lambda_init=0.5,
    )
    return dataclasses.replace(paper, **changes)


def _words(model: LmModelConfig) -> LmConfig:
    """TransNormer's language model (its table 13): the batch is 128 rows in all, and the vocabulary of 267744 words is
    every word of the training text."""
    return LmConfig(
        loop=long_loop(100_000, 128, accumulation=8, length=512),
        data=DataConfig(data="hf:Salesforce/wikitext:wikitext-103-v1", tokenizer="words:max=267744"),
        model=dataclasses.replace(model, dropout=0.1),
        optimizer=OptimizerConfig(
            learning_rate=5e-4,
            warmup_steps=8_000,
            decay="inverse_sqrt",
            beta1=0.9,
            beta2=0.98,
            weight_decay=0.01,
            clip_norm=0.0,
        ),
    )


def _transnormer(variant: Variant, **options: Any) -> LmConfig:
    """`options`: see `transnormer`."""
    return _words(transnormer(variant, LmModelConfig, **TRANSNORMER_SIZES["wikitext103"], **options))


def _competitor(mechanism: Mechanism, layers: int = 6) -> LmConfig:
    """Another row of TransNormer's table 4; those without feed-forward networks have ten layers."""
    return _words(
        LmModelConfig(
            num_layers=layers,
            d_model=512,
            num_heads=8,
            d_ff=2048,
            ffn="relu",
            use_bias=True,
            mechanism=mechanism,
        )
    )


def _tlinformer(mechanism: Mechanism, length: int) -> LmConfig:
    """TLinFormer, section 6.2: 41M parameters, including 21.7M for GPT-2's vocabulary, and ten epochs at every
    length; the training of their public configurations. Their program plans its cosine for 8 to 32 times the steps, so
    that the rate falls by 4% at most."""
    rows = 256
    steps = math.ceil(10 * _WIKITEXT103_TOKENS / (rows * length))
    return LmConfig(
        loop=long_loop(steps, rows, accumulation=32, length=length, eval_every=500, checkpoint_every=250),
        data=DataConfig(data="hf:Salesforce/wikitext:wikitext-103-v1", tokenizer="hf:gpt2"),
        model=LmModelConfig(
            num_layers=8,
            d_model=432,
            num_heads=12,
            d_ff=1280,
            ffn="swiglu",
            use_bias=True,
            ffn_bias=False,
            dropout=0.2,
            mechanism=mechanism,
        ),
        optimizer=OptimizerConfig(
            learning_rate=3e-4, warmup_steps=2_000, decay="constant", weight_decay=0.06
        ),
    )


def _windows(total: int, share: float) -> TLinFormerConfig:
    """An observed window of `total` tokens; a share of them is context."""
    context = round(share * total)
    return TLinFormerConfig(window=total - context, context=context, hidden=2)


def _bsbr(mechanism: BSBRConfig, d_ff: int = 1024) -> LmConfig:
    """The BSBR article's sizes: two layers of width 256 in four heads, 1,024 tokens. It trains nothing; the text and
    the training are ours."""
    return LmConfig(
        loop=LmLoopConfig(
            steps=2_000, batch=8, length=1024, eval_every=250, checkpoint_every=250, eval_tokens=131_072
        ),
        data=DataConfig(),
        model=LmModelConfig(num_layers=2, d_model=256, num_heads=4, d_ff=d_ff, mechanism=mechanism),
        optimizer=OptimizerConfig(learning_rate=2e-3, warmup_steps=100),
    )


# Figure 4 of arXiv:2509.07963. The text has lost its numbers; the authors' release gives them (docs/presets.md).
_CHARACTER_WIDTHS = (256, 384, 512, 768)
_CHARACTER_RATES = {
    "mlr": (3e-3, 1.65e-2, 3e-3, 1.65e-2),
    "full": (3e-3, 3e-3, 1.65e-3, 1.65e-3),
    "local": (3e-3,) * 4,
    "global-window": (3e-3, 3e-3, 3e-3, 1.65e-2),
    "alternate": (1.65e-2,) * 4,
}


def _character_mixers(length: int, *, window: int, run: int) -> dict[str, dict[str, Any]]:
    """MLR attention and what figure 4 compares it with, by name. All of them normalise queries and keys.

    Args:
      window: earlier tokens that a sliding window sees, in all layers or in a part of each head.
      run: how many layers with windows follow one another where they alternate with full attention.
    """
    full = FullConfig(qk_norm=True)
    ranks = (32, 8, 6, 4, 4, 4, 4, 2)
    return {
        "mlr": {"mechanism": MLRConfig(ranks=ranks, context=length)},
        "full": {"mechanism": full},
        "local": {"mechanism": LocalConfig(window=window + 1, qk_norm=True)},
        "global-window": {
            "mechanism": GlobalWindowConfig(window=window + 1, ranks=(32, 32), score_scale=8.0, qk_norm=True)
        },
        "alternate": {
            "mechanism": LocalConfig(window=129, qk_norm=True),
            "late_mechanism": full,
            "schedule": "alternate",
            "early_layers": run,
        },
    }


def _characters(width: int, rate: float, mixers: dict[str, Any]) -> LmConfig:
    """Six layers with heads of 64 on characters, under muP; the rate is constant, so that a run is compared with others
    at every number of operations on its way."""
    return LmConfig(
        loop=long_loop(100_000, 32, length=1024),
        data=DataConfig(data="hf:Skylion007/openwebtext", tokenizer="chars:max=96"),
        model=LmModelConfig(
            num_layers=6,
            d_model=width,
            num_heads=width // 64,
            d_ff=4 * width,
            ffn="gelu",
            vocab_size=96,
            mup_base_width=768,
            mup_base_heads=12,
            **mixers,
        ),
        optimizer=OptimizerConfig(
            learning_rate=rate, warmup_steps=2_000, decay="constant", epsilon=1e-20, weight_decay=0.0
        ),
    )


def _small_characters(mixers: dict[str, Any]) -> LmConfig:
    """Two minutes of a CPU core: two layers of width 128, rows of 512 characters of the standard library's sources, and
    the operations of 400 steps of MLR (`train.tasks.decoder_flops`)."""
    length = 512

    def model(mixers: dict[str, Any]) -> LmModelConfig:
        return LmModelConfig(
            num_layers=2, d_model=128, num_heads=2, d_ff=512, ffn="gelu", vocab_size=96, **mixers
        )

    ours, mlr = (training_flops(model(each), length) for each in (mixers, _SMALL_MIXERS["mlr"]))
    return LmConfig(
        loop=LmLoopConfig(
            steps=round(400 * mlr / ours),
            batch=8,
            length=length,
            eval_every=50,
            checkpoint_every=200,
            eval_tokens=131_072,
        ),
        data=DataConfig(tokenizer="chars:max=96"),
        model=model(mixers),
        optimizer=OptimizerConfig(learning_rate=3e-3, warmup_steps=40),
    )


_SMALL_MIXERS = _character_mixers(512, window=128, run=1)


def _pod(loop: LmLoopConfig, data: DataConfig, mesh: MeshConfig, **sizes: Any) -> LmConfig:
    """For pods: the compressed tokens of every layer read that layer's own past, in all blocks at once."""
    mechanism = BRLConfig(window=512, num_compressed=128, history_size=1024, beta=0.5)
    return LmConfig(
        loop=dataclasses.replace(loop, eval_every=1_000, checkpoint_every=500, eval_tokens=2**24),
        data=data,
        model=LmModelConfig(**sizes, mechanism=mechanism, norm="rms", dtype="bfloat16", remat="full"),
        optimizer=OptimizerConfig(learning_rate=3e-4, warmup_steps=2_000),
        mesh=mesh,
    )


PRESETS: dict[str, LmConfig] = {
    # Two minutes: a token holds some three bytes, so that the network reads more text in less time than "small".
    "stdlib": _stdlib(
        "bpe:2048",
        BRLConfig(window=128, num_compressed=32, compressed_dim=32, history_size=128),
        1e-2,
        steps=125,
        batch=4,
        eval_tokens=32_768,
    ),
    # Ten minutes.
    "small": _stdlib(
        "bytes",
        BRLConfig(window=64, num_compressed=32, compressed_dim=32),
        3e-3,
        steps=500,
        batch=8,
        eval_tokens=65_536,
    ),
    "wikitext103-full": _wikitext103(FullConfig()),
    "wikitext103-local": _wikitext103(LocalConfig(window=128)),
    "wikitext103-local-64": _wikitext103(LocalConfig(window=64)),
    **{f"wikitext103-brl-paper-{size}": _wikitext103(_brl_paper(size, 512)) for size in (64, 128, 256)},
    # Figure 7.
    **{
        f"wikitext103-brl-paper-64-lambda-{strength:g}": _wikitext103(
            _brl_paper(64, 512, lambda_init=strength)
        )
        for strength in (0.1, 0.2, 1.0)
    },
    "wikitext103-brl-paper-64-beta-0": _wikitext103(_brl_paper(64, 512, beta=0.0)),
    "wikitext103-brl-paper-128-gamma-0": _wikitext103(_brl_paper(128, 512, gamma=0.0)),
    "wikitext103-brl": _wikitext103(_brl(128, 512)),
    "wikitext103-brl-64": _wikitext103(_brl(64, 512)),
    "wikitext103-transnormer-t1": _transnormer("t1"),
    "wikitext103-transnormer-t2": _transnormer("t2"),
    # The ends of its table 8, which T2 lies between: one kind of attention in all layers of the same network.
    "wikitext103-transnormer-diag": _transnormer("t2", early_layers=6),
    "wikitext103-transnormer-norm": _transnormer("t2", early_layers=0),
    **{
        f"wikitext103-transnormer-{name}": _competitor(mechanism)
        for name, mechanism in {
            "vanilla": FullConfig(),
            "long-short": LongShortConfig(),
            "linear": LinearConfig(),
            "performer": PerformerConfig(),
        }.items()
    },
    "wikitext103-transnormer-flash-quad": _competitor(GAUConfig(), layers=10),
    "wikitext103-transnormer-flash": _competitor(FlashConfig(), layers=10),
    "wikitext103-tlinformer-base-512": _tlinformer(FullConfig(), 512),
    "wikitext103-tlinformer-base-1k": _tlinformer(FullConfig(), 1024),
    "wikitext103-tlinformer-base-2k": _tlinformer(FullConfig(), 2048),
    "wikitext103-tlinformer-512-512-0.382": _tlinformer(_windows(512, 0.382), 512),
    "wikitext103-tlinformer-512-512-0.5": _tlinformer(_windows(512, 0.5), 512),
    "wikitext103-tlinformer-512-512-0.618": _tlinformer(_windows(512, 0.618), 512),
    "wikitext103-tlinformer-1k-512-0.5": _tlinformer(_windows(512, 0.5), 1024),
    "wikitext103-tlinformer-1k-1k-0.5": _tlinformer(_windows(1024, 0.5), 1024),
    "wikitext103-tlinformer-2k-512-0.5": _tlinformer(_windows(512, 0.5), 2048),
    "wikitext103-tlinformer-2k-2k-0.5": _tlinformer(_windows(2048, 0.5), 2048),
    **{f"bsbr-chunk-{size}": _bsbr(BSBRConfig(chunk_size=size)) for size in (16, 32, 64, 128, 256)},
    # A head has 64 x 64 numbers. The maps to 1024 and back have 8.4M parameters a layer, which "bsbr-wide" has in its
    # feed-forward networks instead.
    "bsbr-compressed-2": _bsbr(BSBRConfig(num_compressed=2048)),
    "bsbr-compressed-4": _bsbr(BSBRConfig(num_compressed=1024)),
    "bsbr-wide": _bsbr(BSBRConfig(), d_ff=1024 + 10_923),
    "openwebtext-full": _openwebtext(FullConfig()),
    "openwebtext-local": _openwebtext(LocalConfig(window=256)),
    "openwebtext-local-128": _openwebtext(LocalConfig(window=128)),
    "openwebtext-brl-paper": _openwebtext(_brl_paper(256, 1024)),
    "openwebtext-brl-paper-128": _openwebtext(_brl_paper(128, 1024)),
    "openwebtext-brl": _openwebtext(_brl(256, 1024)),
    # Three recurrent layers to one as in Qwen3-Next and Kimi Linear (arXiv:2510.26692), five local layers to one as in
    # Gemma 3 (arXiv:2503.19786).
    "openwebtext-gated-deltanet-full": _hybrid(GatedDeltaNetConfig(), 3, FullConfig()),
    "openwebtext-gated-deltanet-brl": _hybrid(GatedDeltaNetConfig(), 3, _brl(256, 1024)),
    "openwebtext-mamba2-full": _hybrid(Mamba2Config(), 3, FullConfig()),
    "openwebtext-local-full": _hybrid(LocalConfig(window=256), 5, FullConfig()),
    **{
        f"owt-chars-{name}-{width}": _characters(width, rate, mixers)
        for name, mixers in _character_mixers(1024, window=512, run=2).items()
        for width, rate in zip(_CHARACTER_WIDTHS, _CHARACTER_RATES[name])
    },
    **{f"chars-{name}": _small_characters(mixers) for name, mixers in _SMALL_MIXERS.items()},
    # 1.3 billion parameters on 32k tokens.
    "pod-1b": _pod(
        LmLoopConfig(steps=50_000, batch=64, length=32_768),
        DataConfig(data="hf:Skylion007/openwebtext", tokenizer="bpe:32768"),
        MeshConfig(),
        num_layers=20,
        d_model=1536,
        num_heads=12,
        d_ff=3840,
    ),
    # 8.2 billion parameters, including the compressed tokens', and a row of 8k tokens on each of 256 chips; parameters
    # and optimiser are divided over all of them.
    "pod-8b": _pod(
        LmLoopConfig(steps=100_000, batch=256, length=8_192),
        DataConfig(data="hf-stream:HuggingFaceFW/fineweb-edu", tokenizer="bpe:32768"),
        MeshConfig(data=1, fsdp=-1),
        num_layers=32,
        d_model=3072,
        num_heads=24,
        num_kv_heads=8,
        d_ff=8192,
    ),
}
