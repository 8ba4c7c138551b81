"""Luna as a layer, and the module that carries its packed tokens from layer to layer."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.dense.full import full_attention
from brl_jax.attention.recurrent.luna import LunaState, init_luna_state, luna_attention
from brl_jax.fields import Count
from brl_jax.layers.compressed.compressed_tokens import spread
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import (
    dense,
    merge_heads,
    norm,
    parameter,
    project_qkv,
    rotary_options,
    rotated,
    scale_scores,
    to_heads,
)
from brl_jax.layers.core.protocol import CacheOwner, Dimensions, LayerCall, Mechanism
from brl_jax.layers.recurrent.recurrent_layer import RecurrentLayer


@dataclasses.dataclass(frozen=True)
class LunaConfig(Mechanism):
    """Attention through a few packed tokens (Luna, arXiv:2106.01540).

    In an encoder the packed tokens read the tokens, the tokens read them, and the packed tokens continue to the next
    layer. In a decoder every layer uses the same learned packed tokens (section 3.3)."""

    linear_cost: ClassVar[bool] = True
    packs: ClassVar[bool] = True
    # An encoder's packed tokens read the whole row.
    packs_bidirectional: ClassVar[bool] = False

    num_packed: Count = 16
    """Packed tokens [l]."""
    chunk_size: Count = 64
    """Tokens in a chunk of a decoder; changes time and memory, not results."""

    def carrier(self, dimensions: Dimensions, **kwargs: Any) -> nn.Module:
        return LunaCarrier(self, dimensions, **kwargs)


class LunaCarrier(CacheOwner):
    """Owns the packed tokens' learned initial values (B, M, D); see `Mechanism.carrier` for the calls. A
    decoder's packed tokens do not depend on the tokens, so there is nothing to cache."""

    def init_cache(self, batch: int, length: int) -> None:
        return None

    @nn.compact
    def __call__(self, x: Float[Array, "B T D"], cache: None) -> Float[Array, "B M D"]:
        d = self.dimensions
        shape = (self.mechanism.num_packed, d.d_model)
        table = parameter(self, "packed", nn.initializers.normal(1.0), shape, ("compressed", "embed"))
        return jnp.broadcast_to(table.astype(d.dtype)[None], (x.shape[0], *shape))

    def close(self, y: Float[Array, "B T D"], cache: None, count: Any) -> None:
        return None


class LunaAttention(RecurrentLayer, config=LunaConfig):
    """See `brl_jax.layers.core.protocol` for the call, whose carry is the packed tokens, and `luna_attention` for the
    mathematics. Rotary positions spread the packed tokens evenly over an encoder's sequence."""

    mechanism: LunaConfig

    def init_state(self, batch: int, length: int) -> LunaState:
        d = self.dimensions
        return init_luna_state(batch, d.num_kv_heads, d.head_dim, num_packed=self.mechanism.num_packed)

    def mix_with_carry(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Any, Any]:
        if self.dimensions.is_causal:
            return super().mix_with_carry(x, call)
        y, carry = self._bidirectional(x, call)
        return y, carry, None

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d = self.dimensions
        query, key, value = project_qkv(d, x, None)
        # All rows of the batch have the same packed tokens.
        packed = to_heads(d, call.carry[:1], "pack_query", "kv_heads")[0]
        packed = scale_scores(packed, d.head_score_factor)
        rotary = rotary_options(d, call.positions)

        def attend(query: Array, key: Array, value: Array, *, is_causal: bool, **options: Any) -> Any:
            assert is_causal  # the function has no other form
            return luna_attention(
                query, key, value, packed, chunk_size=self.mechanism.chunk_size, **rotary, **options
            )

        return Attention(attend, query, key, value)

    def _bidirectional(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Array]:
        """Eqs. 4 to 8: returns the tokens' outputs and the next packed tokens."""
        d, packed = self.dimensions, call.carry
        count, length = packed.shape[1], x.shape[1]
        places = spread(count, length, call.lengths)
        query, key, value = project_qkv(d, x, call.positions)
        pack_query = rotated(d, to_heads(d, packed, "pack_query"), places)
        pack_query = scale_scores(pack_query, d.head_score_factor)
        options: dict[str, Any] = {
            "implementation": d.implementation if d.implementation in ("xla", "cudnn") else None
        }
        read = full_attention(pack_query, key, value, key_value_seq_lengths=call.lengths, **options)
        out_axes = ("heads", "head_dim", "embed")
        read = dense(d, d.d_model, out_axes, name="pack_out", contract=2)(read)
        unpack_key = rotated(d, to_heads(d, read, "unpack_key", "kv_heads"), places)
        unpack_value = to_heads(d, read, "unpack_value", "kv_heads")
        out = full_attention(query, unpack_key, unpack_value, **options)
        return merge_heads(d, out), norm(d, name="packed_norm")(packed + read)
