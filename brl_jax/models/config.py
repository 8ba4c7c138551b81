"""The configuration that all networks share, including which mechanism each layer uses."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal, Self

import jax.numpy as jnp

from brl_jax.attention.core.dispatch import Implementation
from brl_jax.fields import Checked, NonNegative, Positive, Range, Width
from brl_jax.layers.compressed.brl import BRLConfig
from brl_jax.layers.core.protocol import Dimensions, FeedForwardKind, Mechanism, NormKind
from brl_jax.layers.core.side_by_side import SideBySideConfig
from brl_jax.models.inputs import Positions
from brl_jax.models.stack import Remat

Schedule = Literal["split", "alternate", "parallel"]
ComputationType = Literal["float32", "bfloat16"]
_NAMES = frozenset(field.name for field in dataclasses.fields(Dimensions))


@dataclasses.dataclass(frozen=True)
class StackConfig(Checked):
    """Sizes and options of a stack of layers. Every network's configuration derives from it.

        config = StackConfig(num_layers=12, d_model=512, num_heads=8, mechanism=LocalConfig())

    Raises:
      ValueError: an option is out of range, or two options contradict each other.
    """

    num_layers: Annotated[int, Range(1, 10_000)] = 4
    """Number of layers."""
    d_model: Width = 256
    """Width of the residual stream."""
    num_heads: Width = 4
    """Query heads."""
    num_kv_heads: Width | None = None
    """Key/value heads; None for the same number as query heads."""
    head_dim: Width | None = None
    """Width of a head; None for d_model / num_heads. Only full and local attention accept another width."""
    d_ff: Width | None = None
    """Hidden width of the feed-forward network; None for 4 * d_model."""
    ffn: FeedForwardKind = "glu_relu"
    """Feed-forward network: gated by a ReLU ("glu_relu"), a swish ("swiglu"), a GELU ("geglu_erf") or its tanh
    approximation ("geglu"), or ungated with a ReLU ("relu") or the exact GELU ("gelu")."""
    mechanism: Mechanism = BRLConfig()
    """The mechanism that mixes tokens."""
    late_mechanism: Mechanism | None = None
    """A second mechanism for some of the layers."""
    schedule: Schedule = "split"
    """Which layers use the second mechanism: the later ones ("split"), every second one ("alternate"), or all of them
    alongside the first, with both outputs joined ("parallel")."""
    early_layers: int | None = None
    """How many layers use the first mechanism before the second starts ("split"; None: half of them, rounded up) or
    between two layers of the second ("alternate"; None: one)."""
    swap_mechanisms: bool = False
    """Whether to swap the two mechanisms."""
    rope_theta: Positive | None = 10000.0
    """Base of the rotary frequencies, above 0; None disables rotary positions."""
    norm: NormKind = "layer"
    """LayerNorm or RMSNorm."""
    norm_epsilon: NonNegative = 1e-5
    """Added to the variance or mean square before the square root."""
    output_norms: bool = False
    """Whether blocks also normalise the outputs of their mixer and feed-forward network."""
    use_bias: bool = False
    """Whether projections and norms have biases."""
    ffn_bias: bool | None = None
    """Whether feed-forward networks have biases; None follows use_bias."""
    dropout: Annotated[float, Range(0, below=1)] = 0.0
    """Dropout rate after the embedding and after each sublayer."""
    remat: Remat = "none"
    """What the backward pass recomputes in each layer besides elementwise operations, which cost less than keeping
    their results: nothing ("none"), everything except matrix products ("dots"), or everything ("full")."""
    reversible: bool = False
    """Whether layers have two residual streams. Training then stores no layer's activations, because the backward
    pass computes each layer's inputs from its outputs (Reformer, arXiv:2001.04451, section 2.3)."""
    dtype: ComputationType = "float32"
    """Data type of the computation; parameters stay in float32."""
    implementation: Implementation | None = None
    """Backend of the attention functions; None chooses by platform."""
    mup_base_width: Width | None = None
    """The width at which the learning rate was tuned. Initialisation, learning rates and attention scores then follow
    muP, so that the same rate works at this width (docs/mup.md). None: the standard parametrisation."""
    mup_base_heads: Width | None = None
    """Heads of the network that was tuned, which sets its head dimension; None: the same number as here."""

    def __post_init__(self):
        for name in ("mechanism", "late_mechanism"):
            check_mechanism(name, getattr(self, name))
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ValueError(f"d_model must be a multiple of num_heads={self.num_heads}, got {self.d_model}")
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={self.num_heads}, got {self.num_kv_heads}")
        if self.rotary_base is not None and self._head_dim % 2:
            source = "d_model / num_heads = " if self.head_dim is None else ""
            raise ValueError(f"rotary positions need an even head_dim, got {source}{self._head_dim}")
        if self.mup_base_width is None and self.mup_base_heads is not None:
            raise ValueError(f"mup_base_heads must be None without mup_base_width, got {self.mup_base_heads}")
        if self.reversible and self.remat != "none":
            raise ValueError(f"remat must be 'none' with reversible layers, got {self.remat!r}")
        self._check_schedule()
        if self.is_causal is not None:
            _ = self.dimensions  # raises for mechanisms that have no such form

    def _check_schedule(self) -> None:
        group = self.mechanism.group
        if self.num_layers % group:
            raise ValueError(
                f"num_layers must be a multiple of {group}, the layers of a block of {self.mechanism.name}, "
                f"got {self.num_layers}"
            )
        for mechanism in (self.mechanism, self.late_mechanism):
            if mechanism is not None and mechanism.group > 1 and self.late_mechanism is not None:
                raise ValueError(
                    f"late_mechanism must be None with {mechanism.name}, which must be in all layers, "
                    f"got {self.late_mechanism.name}"
                )
        if self.late_mechanism is None:
            for name, alone in (("schedule", "split"), ("early_layers", None), ("swap_mechanisms", False)):
                if getattr(self, name) != alone:
                    raise ValueError(
                        f"{name} must be {alone!r} without a late_mechanism, got {getattr(self, name)!r}"
                    )
        elif self.early_layers is None and self.num_layers == 1 and self.schedule != "parallel":
            raise ValueError(
                f"num_layers must be at least 2 with schedule {self.schedule!r} of two mechanisms, got 1"
            )
        elif self.early_layers is not None:
            if self.schedule == "parallel":
                raise ValueError(
                    f"early_layers must be None with schedule 'parallel', in which every layer has both mechanisms, "
                    f"got {self.early_layers}"
                )
            ends = (0, self.num_layers) if self.schedule == "split" else (1, self.num_layers - 1)
            if not ends[0] <= self.early_layers <= ends[1]:
                raise ValueError(
                    f"early_layers must be {ends[0]} to {ends[1]} with schedule {self.schedule!r} over "
                    f"{self.num_layers} layers, got {self.early_layers}"
                )

    @property
    def rotary_base(self) -> float | None:
        """Base of the rotary frequencies that the layers use; None if they do not rotate."""
        return self.rope_theta if self.positions == "rope" else None

    @property
    def positions(self) -> Positions:
        """How positions enter the network; a field of networks with a choice."""
        return "rope"

    @property
    def _head_dim(self) -> int:
        return self.d_model // self.num_heads if self.head_dim is None else self.head_dim

    @property
    def mechanisms(self) -> tuple[Mechanism, ...]:
        """The mechanism of each layer."""
        if self.late_mechanism is None:
            return (self.mechanism,) * self.num_layers
        first, second = self.mechanism, self.late_mechanism
        if self.swap_mechanisms:
            first, second = second, first
        early = self.early_layers
        if self.schedule == "parallel":
            return (SideBySideConfig(first, second),) * self.num_layers
        if self.schedule == "alternate":
            run = 1 if early is None else early
            return tuple(second if i % (run + 1) == run else first for i in range(self.num_layers))
        early = (self.num_layers + 1) // 2 if early is None else early
        return (first,) * early + (second,) * (self.num_layers - early)

    def for_training(self, length: int) -> Self:
        """Returns this configuration with every length-dependent setting of its mechanisms fixed for training on
        `length` tokens (`Mechanism.for_training`)."""
        late = self.late_mechanism
        return dataclasses.replace(
            self,
            mechanism=self.mechanism.for_training(length),
            late_mechanism=None if late is None else late.for_training(length),
        )

    @property
    def is_causal(self) -> bool | None:
        """Whether the layers are a decoder's; None if the configuration leaves it open."""
        return None

    @property
    def dimensions(self) -> Dimensions:
        """The dimensions that each layer of the network is built with."""
        assert self.is_causal is not None
        return self.make_dimensions(self.is_causal)

    def make_dimensions(self, is_causal: bool) -> Dimensions:
        """Returns the dimensions that each layer of a decoder (`is_causal`) or an encoder is built with.

        Raises:
          ValueError: a mechanism does not support this kind of network, or an option is incompatible with it.
        """
        base_width, base_heads = self.mup_base_width, self.mup_base_heads or self.num_heads
        if base_width is not None and base_width % base_heads:
            raise ValueError(
                f"mup_base_width must be a multiple of the {base_heads} heads of its network (mup_base_heads), got "
                f"{base_width}"
            )
        same: dict[str, Any] = {name: value for name, value in vars(self).items() if name in _NAMES}
        resolved: dict[str, Any] = {
            "num_kv_heads": self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            "head_dim": self._head_dim,
            "d_ff": 4 * self.d_model if self.d_ff is None else self.d_ff,
            "is_causal": is_causal,
            "rope_theta": self.rotary_base,
            "ffn_bias": self.use_bias if self.ffn_bias is None else self.ffn_bias,
            "residual_scale": 1.0 / (2 * self.num_layers),
            "dtype": jnp.dtype(self.dtype),
            "base_width": base_width,
            "base_head_dim": None if base_width is None else base_width // base_heads,
        }
        dimensions = Dimensions(**same | resolved)
        for mechanism in set(self.mechanisms):
            _check_options(mechanism, dimensions)
            mechanism.check(dimensions)
        return dimensions


def _check_options(mechanism: Mechanism, dimensions: Dimensions) -> None:
    """Raises ValueError if a mechanism does not support one of the network's options."""
    name, d = mechanism.name, dimensions
    if d.num_heads * d.head_dim != d.d_model and not mechanism.any_head_dim:
        raise ValueError(
            f"head_dim must be d_model / num_heads = {d.d_model / d.num_heads:g} with mechanism {name}, got "
            f"{d.head_dim}"
        )
    if d.output_norms and (mechanism.residual == "post" or mechanism.network is not None):
        raise ValueError(f"output_norms must be False with mechanism {name}, which places its own norms")
    if d.reversible:
        if mechanism.residual == "mixer" or mechanism.network is not None:
            raise ValueError(
                f"reversible must be False with mechanism {name}, whose layers are not a mixer and a feed-forward "
                "network"
            )
        if mechanism.carrier(d, parent=None) is not None:
            raise ValueError(
                f"reversible must be False with mechanism {name}, whose layers pass on more than the residual stream"
            )


def check_mechanism(name: str, value: object) -> None:
    """Raises ValueError unless `value` is a mechanism's configuration; a late mechanism may also be None."""
    if isinstance(value, Mechanism) or (name == "late_mechanism" and value is None):
        return
    got = value.__name__ if isinstance(value, type) else repr(value)
    raise ValueError(
        f"{name} must be the configuration of a mechanism, such as FullConfig() or MECHANISMS['full'](), got {got}"
    )


def check_config(config: object, kind: type) -> None:
    """Raises ValueError unless a network's `config` is of the class that it needs."""
    if not isinstance(config, kind):
        got = "None" if config is None else type(config).__name__
        article = "an" if kind.__name__.startswith("E") else "a"
        raise ValueError(f"config must be {article} {kind.__name__}, got {got}")
