"""What every attention mechanism offers to the networks above it, which never ask which one it is.

A mechanism is a configuration dataclass, derived from `Mechanism`, and the Linen module that its `layer` method
builds. The module maps (B, T, d) to (B, T, d):

    y, carry, cache = layer(x, carry=carry, cache=cache, positions=..., lengths=..., segment_ids=...,
                            count=..., deterministic=...)

carry   passes from layer to layer in one call of the network (BRL's compressed tokens); None for most mechanisms. A
        mechanism with a carry also has a `carrier`, a module that opens it before the first layer and closes it
        after the last.
cache   is None, or a pytree made by `layer.init_cache(batch, length)` for generation (it takes any number of new
        tokens at a time: prefill and step are the same call), or one made by `layer.init_memory(batch)` for
        training on streams, where it carries the past from one batch to the next without gradient. The layer returns
        the updated pytree of the same structure. `layer.memory_from_cache(cache)` gives the memory at the point
        where a decoding cache has arrived, and a new cache updated with a memory's entries goes on from there.
count   with a decoding cache: how many of the T new tokens exist, the first ones (traced; None: all). What the rest
        give is undefined, and they leave no trace in the cache.

For looking inside, a layer may sow into the collection "maps" (`apply(..., mutable="maps")`): as "weights" the matrix
(B, N, T, T) by which each head maps the tokens' values to its outputs (`common.sow_weights`; given without a cache
only), and whatever else it has under other names.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.sharding import constrain


@dataclasses.dataclass(frozen=True)
class Dimensions:
    """What a network tells each of its layers.

    Attributes:
      d_model, d_ff: model width and feed-forward width.
      ffn: kind of the feed-forward network (see `FeedForward`).
      num_heads, num_kv_heads: query heads and key/value heads; the first is a multiple of the second.
      head_dim: size of a head.
      is_causal: whether outputs may depend on later tokens.
      rope_theta: base of the rotary frequencies; None for no rotary embedding.
      norm: "layer" or "rms".
      use_bias: biases in projections and norms.
      ffn_bias: biases in the feed-forward network.
      dropout: rate after the embedding, the mixer and the feed-forward network.
      residual_scale: variance factor of the weights that write into the residual stream.
      dtype, param_dtype: of the computation and of the parameters.
      implementation: passed to the attention functions.
      base_width, base_head_dim: model width and head size of the network whose scores muP keeps (Yang et al. 2022,
        arXiv:2203.03466); None without muP.
    """

    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    is_causal: bool
    ffn: str = "glu_relu"
    rope_theta: float | None = 10000.0
    norm: str = "layer"
    use_bias: bool = False
    ffn_bias: bool = False
    dropout: float = 0.0
    residual_scale: float = 1.0
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    implementation: Any = None
    base_width: int | None = None
    base_head_dim: int | None = None

    @property
    def head_score_factor(self) -> float:
        """What turns scores of products over sqrt(head_dim) into muP's, over head_dim: 1 at the base size."""
        return 1.0 if self.base_head_dim is None else math.sqrt(self.base_head_dim / self.head_dim)

    @property
    def width_score_factor(self) -> float:
        """The same for products over the model's width."""
        return 1.0 if self.base_width is None else math.sqrt(self.base_width / self.d_model)


@dataclasses.dataclass(frozen=True)
class Mechanism:
    """Base of the configuration dataclasses; the properties say what a mechanism can do."""

    network: ClassVar[str | None] = None
    """Name of the network class that must arrange this mechanism's layers, for a mechanism that is more than a layer
    (TLinFormer). `brl_jax.models` lists those classes by name; None is the ordinary stack of blocks."""

    @property
    def causal(self) -> bool:
        """Has a form in which no output depends on a later token."""
        return True

    @property
    def bidirectional(self) -> bool:
        """Has a form in which outputs may depend on every token."""
        return True

    @property
    def linear_cost(self) -> bool:
        """Time and memory grow linearly with the length."""
        return False

    @property
    def packs(self) -> bool:
        """Takes segment_ids: several sequences in one row, none of which sees another."""
        return False

    @property
    def decodes(self) -> bool:
        """Generates token by token from a cache."""
        return self.causal

    @property
    def residual(self) -> str:
        """Where a block normalises around this mechanism, one of

        "pre":  h = x + mix(norm(x));  out = h + ffn(norm(h))
        "ffn":  h = x + mix(x);        out = h + ffn(norm(h))
        "post": h = x + norm(mix(x));  out = h + norm(ffn(h))
        "mixer": out = x + mix(norm(x)), for a mechanism that is its own feed-forward network
        """
        return "pre"

    @property
    def segment(self) -> int | None:
        """Not None: a call may span at most this many tokens, counted from multiples of it, because later tokens
        need what the whole network made of earlier ones. The network cuts longer sequences itself."""
        return None

    @property
    def group(self) -> int:
        """Layers that belong together: a network's number of them must be a multiple of it."""
        return 1

    def check(self, dimensions: Dimensions) -> None:
        """Raises ValueError if this mechanism cannot serve a network of these dimensions."""
        if dimensions.is_causal and not self.causal:
            raise ValueError(f"mechanism {type(self).__name__} has no causal form; use it in an encoder")
        if not dimensions.is_causal and not self.bidirectional:
            raise ValueError(
                f"mechanism {type(self).__name__} has no bidirectional form; use it in a decoder"
            )

    def check_stretches(self, length: int, devices: int) -> None:
        """Raises ValueError if so many devices cannot share rows of `length` tokens, a multiple of their number."""

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        """The Linen module of one layer."""
        raise NotImplementedError

    def carrier(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module | None:
        """The module that opens and closes this mechanism's carry, or None.

        `carry = carrier(x, cache)` before the first layer and `cache = carrier.close(y, cache, count)` after the
        last, with y what the network puts out; `cache` as for layers, by `init_cache` and `init_memory`.
        """
        return None


def token_positions(length: int, start: Any = 0) -> Int[Array, "1 T"]:
    """Positions start..start+length-1 as (1, length)."""
    return (jnp.arange(length, dtype=jnp.int32) + jnp.asarray(start, jnp.int32))[None]


@dataclasses.dataclass(frozen=True)
class Call:
    """What a layer is told besides its input; see the module's text.

    Attributes:
      start: how many tokens the cache holds, 0 without one; positions: of the new ones, counted from there by default.
    """

    cache: Any
    start: Any
    positions: Any
    lengths: Any
    segment_ids: Any
    count: Any
    deterministic: bool

    def new(self, length: int) -> Any:
        """How many of `length` new tokens exist."""
        return length if self.count is None else self.count


class MemorylessLayer(nn.Module):
    """A layer that has no part in a carry, and passes nothing from one training batch to the next.

    A mechanism gives `mix`, and `tokens_in` where its cache has no "index".
    """

    mechanism: Any
    dimensions: Any

    def init_memory(self, batch: int) -> None:
        return None

    def memory_from_cache(self, cache: Any) -> None:
        return None

    def tokens_in(self, cache: Any) -> Any:
        """How many tokens a decoding cache holds."""
        return cache["index"]

    def mix(self, x: Float[Array, "B T D"], call: Call) -> tuple[Array, Any]:
        """The layer's output (B, T, D) and its new cache."""
        raise NotImplementedError

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T D"],
        *,
        carry: Any = None,
        cache: Any = None,
        positions: Any = None,
        lengths: Any = None,
        segment_ids: Any = None,
        count: Any = None,
        deterministic: bool = True,
    ):
        check_call(self.mechanism, segment_ids)
        start = 0 if cache is None else self.tokens_in(cache)
        positions = token_positions(x.shape[1], start) if positions is None else positions
        # Every device makes the angles of its own tokens.
        positions = constrain(positions, ("batch" if positions.shape[0] > 1 else None, "length"))
        call = Call(cache, start, positions, lengths, segment_ids, count, deterministic)
        y, cache = self.mix(x, call)
        return y, carry, cache


def check_call(mechanism: Mechanism, segment_ids: Any) -> None:
    """Raises ValueError when a layer of `mechanism` is given what it cannot serve."""
    if segment_ids is not None and not mechanism.packs:
        raise ValueError(
            f"segment_ids: mechanism {type(mechanism).__name__} cannot keep packed sequences apart; "
            "give each sequence its own row"
        )
