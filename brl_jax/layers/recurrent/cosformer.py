"""cosFormer as a layer, with a decoding cache whose size does not depend on the length."""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.recurrent.cosformer import CosformerState, cosformer_attention, init_cosformer_state
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import project_unrotated
from brl_jax.layers.core.protocol import LayerCall
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig, RecurrentLayer


@dataclasses.dataclass(frozen=True)
class CosformerConfig(RecurrentConfig):
    """cosFormer (Qin et al. 2022, arXiv:2202.08791)."""

    max_length: Count | None = None
    """The distance at which a weight reaches 0, at least the length of the longest sequence. None uses the length of
    the rows, as the authors' code does, and the cache's length in generation. Rows of different lengths then weigh the
    same distance differently, so a sequence alone differs from the same sequence padded or packed in a longer row."""
    min_length: Count = 1
    """If `max_length` is None, the distance at which a weight reaches 0 in shorter rows and caches. Training a language
    model sets it to the length of its rows (`Mechanism.for_training`), so that generating a shorter text weighs
    distances as in training."""

    def furthest(self, length: int) -> int:
        """Returns the distance at which a weight reaches 0, in rows or a cache of `length` tokens."""
        return max(self.min_length, length) if self.max_length is None else self.max_length

    def for_training(self, length: int) -> CosformerConfig:
        return dataclasses.replace(self, min_length=max(self.min_length, length))


class CosformerCache(NamedTuple):
    """The decoding cache of `CosformerAttention`.

    Attributes:
      state: `cosformer_attention`'s.
      length: () int32, how many tokens the state has seen.
      max_length: () int32, the distance at which a weight reaches 0.
    """

    state: CosformerState
    length: Int[Array, ""]
    max_length: Int[Array, ""]


class CosformerAttention(RecurrentLayer, config=CosformerConfig):
    """`cosformer_attention`. Its weights already depend on distance, so it uses no rotary positions."""

    def init_cache(self, batch: int, length: int) -> CosformerCache:
        d, furthest = self.dimensions, self.mechanism.furthest(length)
        if length > furthest:
            raise ValueError(
                f"max_length={furthest} of the cosformer mechanism must be at least the cache's length {length}"
            )
        state = init_cosformer_state(batch, d.num_kv_heads, d.head_dim)
        return CosformerCache(state, jnp.zeros((), jnp.int32), jnp.asarray(furthest, jnp.int32))

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        cache, m = call.cache, self.mechanism
        function = functools.partial(
            cosformer_attention,
            max_length=m.furthest(x.shape[1]) if cache is None else cache.max_length,
            chunk_size=m.chunk_size,
        )
        return Attention(function, *project_unrotated(self.dimensions, x))
