"""The protocol between attention mechanisms and networks, which never ask which mechanism they run.

A mechanism is two classes: a frozen configuration dataclass derived from `Mechanism`, and a Linen module derived from
`MechanismLayer`, which names its configuration. The module mixes the tokens of x (B, T, D):

    y, carry, cache = layer(x, carry=carry, cache=cache, positions=..., lengths=..., segment_ids=..., count=...,
                            deterministic=...)

A complete mechanism, in which each token sees the mean of the values up to and including its own:

    class MeanCache(NamedTuple):
        total: jax.Array  # (B, 1, N, H), the sum of the values so far
        length: jax.Array  # (), how many they are

    @dataclasses.dataclass(frozen=True)
    class MeanConfig(Mechanism):
        bidirectional: ClassVar[bool] = False
        linear_cost: ClassVar[bool] = True

    class MeanLayer(MechanismLayer, config=MeanConfig):
        def init_cache(self, batch, length):
            d = self.dimensions
            return MeanCache(jnp.zeros((batch, 1, d.num_heads, d.head_dim), d.dtype), jnp.zeros((), jnp.int32))

        def mix(self, x, call):
            d, length = self.dimensions, x.shape[1]
            value = dense(d, (d.num_heads, d.head_dim), ("embed", "heads", "head_dim"), name="value")(x)
            total = jnp.cumsum(value, axis=1) + (0.0 if call.cache is None else call.cache.total)
            number = (call.start + 1 + jnp.arange(length)).astype(d.dtype)
            y = merge_heads(d, total / number[None, :, None, None])
            if call.cache is None:
                return y, None
            new, totals = call.num_new(length), jnp.concatenate([call.cache.total, total], axis=1)
            return y, MeanCache(jax.lax.dynamic_slice_in_dim(totals, new, 1, axis=1), call.start + new)

To list it, add the configuration to `MECHANISMS` (`brl_jax/layers/__init__.py`), a small instance to
`tests/laws/cases.py`, and a NumPy oracle to tests/oracles. The suite of laws tests the rest, guided by the
capability flags.

The arguments of the call:

carry   passes from layer to layer within one call of the network (BRL's compressed tokens); None for most mechanisms.
        A mechanism with a carry also has a `carrier`, a module that creates the carry before the first layer and
        consumes it after the last.
cache   is None in training; or a decoding cache from `layer.init_cache(batch, length)`, which accepts any number of new
        tokens at a time, so that prefill and decoding are the same call; or a training memory from
        `layer.init_memory(batch)`, which passes from one batch of a stream to the next without gradient. Decoding
        caches and memories are NamedTuples of different types, and the layer returns the updated value in the same
        type. Their `length` is the number of tokens whose positions precede the new ones, 0 in a memory.
        `layer.memory_from_cache(cache)` returns the memory after the tokens in a decoding cache, and
        `layer.resume(cache, memory)` returns a new decoding cache that continues after a memory.
count   with a decoding cache, how many of the T new tokens are valid, from the first (0 to T, traced; None for all).
        The outputs of the others are undefined, and the cache ignores them.

A layer may also sow values for inspection into the collection "maps" (`apply(..., mutable="maps")`): as "weights" the
matrix (B, N, T, T) that maps the tokens' values to each head's outputs (`modules.sow_weights`; only without a cache),
and anything else under other names.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Annotated, Any, ClassVar, Literal

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import require
from brl_jax.attention.core.dispatch import Implementation
from brl_jax.attention.core.segments import run_numbers
from brl_jax.fields import Checked, Count, Natural, NonNegative, Positive, Range
from brl_jax.sharding import constrain

NormKind = Literal["layer", "rms"]
FeedForwardKind = Literal["glu_relu", "swiglu", "geglu", "geglu_erf", "relu", "gelu"]
Residual = Literal["pre", "ffn", "post", "mixer"]


@dataclasses.dataclass(frozen=True)
class Dimensions(Checked):
    """Sizes and options that a network passes to each of its layers.

    Attributes:
      d_model, d_ff: model width and feed-forward width.
      ffn: kind of the feed-forward network (see `FeedForward`).
      num_heads, num_kv_heads: query heads and key/value heads; the first is a multiple of the second.
      head_dim: width of a head; num_heads * head_dim is the model width unless a mechanism's `any_head_dim` is True.
      is_causal: True in a decoder, whose outputs must not depend on later tokens.
      rope_theta: base of the rotary frequencies; None for no rotary embedding.
      norm: "layer" or "rms".
      norm_epsilon: added to the variance or mean square.
      output_norms: a block also normalises the outputs of its mixer and feed-forward network (see `Block`).
      reversible: layers have two residual streams (see `brl_jax.models.reversible`).
      use_bias: biases in projections and norms.
      ffn_bias: biases in the feed-forward network.
      dropout: rate after the embedding, the mixer and the feed-forward network.
      residual_scale: variance factor of weights that write into the residual stream.
      dtype, param_dtype: of the computation and of the parameters.
      lora_rank, lora_alpha: of the low-rank changes to dense weights (see `modules.dense`); 0 for none.
      implementation: passed to the attention functions.
      base_width, base_head_dim: model width and head width of the network whose scores muP preserves (Yang et al. 2022,
        arXiv:2203.03466); None without muP.

    Raises:
      ValueError: an option is out of range.
    """

    d_model: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Count
    d_ff: Count
    is_causal: bool
    ffn: FeedForwardKind = "glu_relu"
    rope_theta: Positive | None = 10000.0
    norm: NormKind = "layer"
    norm_epsilon: NonNegative = 1e-5
    output_norms: bool = False
    reversible: bool = False
    use_bias: bool = False
    ffn_bias: bool = False
    dropout: Annotated[float, Range(0, below=1)] = 0.0
    residual_scale: NonNegative = 1.0
    dtype: Any = jnp.float32
    param_dtype: Any = jnp.float32
    lora_rank: Natural = 0
    lora_alpha: Positive = 16.0
    implementation: Implementation | None = None
    base_width: Count | None = None
    base_head_dim: Count | None = None

    @functools.cached_property
    def weight_dtype(self) -> Any:
        """Of dense weights and embeddings. With `lora_rank` they do not change, so the computation's is enough."""
        return self.dtype if self.lora_rank else self.param_dtype

    @property
    def head_score_factor(self) -> float:
        """Factor that turns products over sqrt(head_dim) into muP's over head_dim; 1 at the base size."""
        return 1.0 if self.base_head_dim is None else math.sqrt(self.base_head_dim / self.head_dim)

    @property
    def width_score_factor(self) -> float:
        """The same factor for products over the model width."""
        return 1.0 if self.base_width is None else math.sqrt(self.base_width / self.d_model)


@dataclasses.dataclass(frozen=True)
class Mechanism(Checked):
    """Base of the mechanisms' configurations.

    The first group of members are capability flags, which tell networks, scripts and the suite of laws what to expect.
    A subclass overrides a flag with a class variable (`linear_cost: ClassVar[bool] = True`), or with a property if it
    depends on the fields, so read flags from instances. Every mechanism has the second group. The rest are optional
    hooks, which do nothing by default.
    """

    # --- Capability flags ---

    @property
    def causal(self) -> bool:
        """Has a form whose outputs do not depend on later tokens."""
        return True

    @property
    def bidirectional(self) -> bool:
        """Has a form whose outputs may depend on every token."""
        return True

    @property
    def linear_cost(self) -> bool:
        """Time and memory grow linearly with the length."""
        return False

    @property
    def packs(self) -> bool:
        """Accepts segment_ids in a decoder, so that one row can hold several independent sequences."""
        return False

    @property
    def packs_bidirectional(self) -> bool:
        """Accepts segment_ids in an encoder."""
        return self.packs and self.bidirectional

    @property
    def decodes(self) -> bool:
        """Generates token by token from a cache."""
        return self.causal

    @property
    def any_head_dim(self) -> bool:
        """Accepts heads whose total width differs from the model width."""
        return False

    #: Its name in `MECHANISMS`, or its class's if it is not listed there.
    name: ClassVar[str]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        cls.name = cls.__name__

    # --- Required ---

    module: ClassVar[Any]
    """The class of the layers, which sets it: `class MeanLayer(MechanismLayer, config=MeanConfig)`."""

    def check(self, dimensions: Dimensions) -> None:
        """Raises ValueError if this mechanism does not support a network of these dimensions."""
        if dimensions.is_causal and not self.causal:
            raise ValueError(f"mechanism {self.name} has no causal form; use it in an encoder")
        if not dimensions.is_causal and not self.bidirectional:
            raise ValueError(f"mechanism {self.name} has no bidirectional form; use it in a decoder")

    def layer(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        """Returns the Linen module of one layer; `kwargs` are `name` and `parent`."""
        return self.module(self, dimensions, **kwargs)

    # --- Optional hooks ---

    network: ClassVar[str | None] = None
    """Name of the network class that must arrange this mechanism's layers, if it is more than a layer (TLinFormer).
    `brl_jax.models` lists those classes by name; None is the ordinary stack of blocks."""

    @property
    def residual(self) -> Residual:
        """Where a block normalises around this mechanism, one of

        "pre":  h = x + mix(norm(x));  out = h + ffn(norm(h))
        "ffn":  h = x + mix(x);        out = h + ffn(norm(h))
        "post": h = x + norm(mix(x));  out = h + norm(ffn(h))
        "mixer": out = x + mix(norm(x)), for a mechanism that includes a feed-forward network
        """
        return "pre"

    @property
    def segment(self) -> int | None:
        """The longest piece of a sequence that one call may span, counted from multiples of it; None for no limit.
        Later tokens need the network's outputs for earlier pieces, so the network cuts longer sequences itself."""
        return None

    @property
    def group(self) -> int:
        """How many layers belong together; a network's number of layers must be a multiple of it."""
        return 1

    @property
    def num_summary(self) -> int:
        """How many tokens an encoder compresses a sequence into; a decoder may read them in addition to the outputs
        (BRL). See `CacheOwner.summary`."""
        return 0

    def for_training(self, length: int) -> Mechanism:
        """Returns this mechanism with length-dependent settings fixed for rows of `length` tokens, so that generation
        uses the same ones as training."""
        return self

    def check_shards(self, length: int, devices: int) -> None:
        """Raises ValueError if rows of `length` tokens, a multiple of `devices`, cannot be sharded over the devices."""

    def carrier(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module | None:
        """Returns the module that creates this mechanism's carry, or None if it has no carry.

        The network calls `carry = carrier(x, cache)` before the first layer and `cache = carrier.close(y, cache,
        count)` after the last, where y is its output. `cache` is as for layers; the methods are `CacheOwner`'s.
        """
        return None


def check_packs(mechanism: Mechanism, dimensions: Dimensions) -> None:
    """Raises ValueError unless a mechanism accepts segment_ids in a network of these dimensions."""
    if mechanism.packs if dimensions.is_causal else mechanism.packs_bidirectional:
        return
    place = " in an encoder" if mechanism.packs else ""
    raise ValueError(
        f"segment_ids: mechanism {mechanism.name} cannot keep packed sequences apart{place}; "
        "give each sequence its own row"
    )


def check_max_length(mechanism: Any, length: int) -> None:
    """Raises ValueError if a sequence of `length` tokens is longer than the mechanism's `max_length`."""
    require(
        length <= mechanism.max_length,
        f"max_length must be at least the sequence's length {length}, got {mechanism.max_length}: "
        f"mechanism {mechanism.name} has parameters for each position",
    )


def token_positions(length: int, start: Any = 0) -> Int[Array, "1 T"]:
    """Returns the positions start..start+length-1 as (1, length)."""
    return (jnp.arange(length, dtype=jnp.int32) + jnp.asarray(start, jnp.int32))[None]


@dataclasses.dataclass(frozen=True)
class LayerCall:
    """The arguments of one call of a layer, apart from its input x (B, T, D).

    Attributes:
      carry: from the layer below; see the module's docstring.
      cache: a decoding cache, a training memory, or None.
      start: number of tokens in the decoding cache, 0 without one.
      positions: (1, T) or (B, T) ints; by default they continue from `start`.
      lengths: (B,) ints, the lengths of an encoder's sequences, or None.
      segment_ids: (B, T) ints, equal within a sequence and different between neighbours, or None.
      count: how many of the new tokens are valid, or None for all.
      deterministic: whether dropout is off.
    """

    carry: Any
    cache: Any
    start: Any
    positions: Any
    lengths: Any
    segment_ids: Any
    count: Any
    deterministic: bool

    def num_new(self, length: int) -> Any:
        """Returns how many of `length` new tokens are valid."""
        return length if self.count is None else self.count


class CacheOwner(nn.Module):
    """A module with a decoding cache and, optionally, a training memory."""

    mechanism: Any
    dimensions: Dimensions

    def __init_subclass__(cls, config: type[Mechanism] | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if config is not None:
            config.module = cls

    def init_cache(self, batch: int, length: int) -> Any:
        """Returns an empty decoding cache for `batch` sequences of up to `length` tokens."""
        raise NotImplementedError

    def init_memory(self, batch: int) -> Any:
        """Returns the training memory at the start of `batch` streams, or None if nothing passes between batches."""
        return None

    def memory_from_cache(self, cache: Any) -> Any:
        """Returns the training memory after the tokens in a decoding cache."""
        return None

    def summary(self, carry: Any) -> Any:
        """For a carrier: returns the tokens (B, M, E) into which an encoder compressed the sequence, given the carry
        after its last layer; M is the mechanism's `num_summary`. None if it does not compress."""
        return None

    def resume(self, cache: Any, memory: Any) -> Any:
        """Returns the empty decoding cache `cache`, changed so that it continues after a training memory."""
        return cache


class MechanismLayer(CacheOwner):
    """Base of the layers, which checks and completes the arguments. A mechanism implements `mix` and `init_cache`."""

    packs_cache: ClassVar[bool] = False
    """Whether segment_ids may come with a cache: a recurrent state drops the sequence before, and BRL has a training
    memory, while a cache of tokens has one sequence in each row."""

    def mix(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any]:
        """Returns the layer's output (B, T, D) and its new cache."""
        raise NotImplementedError

    def mix_with_carry(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any, Any]:
        """Returns the output, the new carry and the new cache; mechanisms with a carry override this, not `mix`."""
        y, cache = self.mix(x, call)
        return y, call.carry, cache

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
        """Returns the output (B, T, D), the new carry and the new cache; see the module's docstring.

        Raises:
          ValueError: the mechanism does not support the dimensions, or segment_ids are given, but it does not pack in
            this form, or the decoding cache cannot keep sequences apart.
        """
        self.mechanism.check(self.dimensions)
        if segment_ids is not None:
            check_packs(self.mechanism, self.dimensions)
            require(
                cache is None or self.packs_cache,
                "segment_ids must be None with a decoding cache, which has one sequence in each row",
            )
            # Functions that compare ids would let a sequence see an earlier one with the same id.
            segment_ids = run_numbers(jnp.asarray(segment_ids))
        start = 0 if cache is None else cache.length
        positions = token_positions(x.shape[1], start) if positions is None else positions
        # Each device computes the angles of its own tokens.
        positions = constrain(positions, ("batch" if positions.shape[0] > 1 else None, "length"))
        if count is not None:
            count = jnp.asarray(count, jnp.int32)  # 64 bits would widen the cache's length
        call = LayerCall(carry, cache, start, positions, lengths, segment_ids, count, deterministic)
        return self.mix_with_carry(x, call)
