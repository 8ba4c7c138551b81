"""Sparse Sinkhorn attention as a layer, with its sorting network and a cache of all tokens and the blocks' logits."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import zero_padding
from brl_jax.attention.core.state import KeyValueCache
from brl_jax.attention.sorting.sinkhorn import init_sinkhorn_state, sinkhorn_attention
from brl_jax.fields import Count, Positive
from brl_jax.layers.core.attention_layer import Attention, AttentionLayer
from brl_jax.layers.core.modules import dense, project_qkv
from brl_jax.layers.core.protocol import LayerCall, Mechanism, check_max_length


@dataclasses.dataclass(frozen=True)
class SinkhornConfig(Mechanism):
    """Attention to a token's own block and to a learned mixture of blocks (Sparse Sinkhorn Attention,
    arXiv:2002.11296).

    Mixing the blocks takes time that grows with length^2 / block_size, and generation keeps all tokens."""

    block_size: Count = 64
    """Tokens in a block."""
    max_length: Count = 4096
    """Length of the longest sequence; the sorting network has an output for each of its blocks."""
    iterations: Count = 8
    """How often Sinkhorn's normalisation divides rows and columns by their sums."""
    temperature: Positive = 0.75
    """Divides the sorting logits; smaller values come closer to a permutation. If the network is called with
    deterministic=False and has a key "sample" among its rngs, as in training, Gumbel noise is added first."""

    def blocks(self, length: int) -> int:
        """Returns how many blocks `length` tokens have.

        Raises:
          ValueError: `length` is above max_length.
        """
        check_max_length(self, length)
        return -(-length // self.block_size)


class SinkhornCache(NamedTuple):
    """A decoding cache.

    Attributes:
      past: the keys and values of all tokens so far.
      total: the sum of the layer's inputs, in float32.
      sort_logits: the sorting network's outputs for the blocks that have begun; zeros for the others.
    """

    past: KeyValueCache
    total: Float[Array, "B D"]
    sort_logits: Float[Array, "B C K C"]

    @property
    def length(self) -> Int[Array, ""]:
        return self.past.length


class SinkhornAttention(AttentionLayer, config=SinkhornConfig):
    """The sorting logits are relu(W_B relu(W_P s + b_P) + b_B) in float32, where s is the sum of a block's inputs. In a
    decoder s is the sum of all inputs up to the block's first.
    """

    mechanism: SinkhornConfig

    def init_cache(self, batch: int, length: int) -> SinkhornCache:
        d = self.dimensions
        blocks = self.mechanism.blocks(length)
        return SinkhornCache(
            init_sinkhorn_state(
                batch,
                d.num_kv_heads,
                d.head_dim,
                length=length,
                block_size=self.mechanism.block_size,
                dtype=d.dtype,
            ),
            jnp.zeros((batch, d.d_model), jnp.float32),
            jnp.zeros((batch, blocks, d.num_kv_heads, blocks), jnp.float32),
        )

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        d, m = self.dimensions, self.mechanism
        query, key, value = project_qkv(d, x, call.positions)
        kept, rng = {}, None
        if call.cache is None:
            if not call.deterministic and self.has_rng("sample"):
                rng = self.make_rng("sample")
            sums = self._sums(zero_padding(x, None if d.is_causal else call.lengths))
            sort_logits = self._sort_network(sums, sums.shape[1])
        else:
            total, sort_logits = self._begin_blocks(x, call)
            kept = {"total": total, "sort_logits": sort_logits}
        function = functools.partial(
            sinkhorn_attention,
            sort_logits=sort_logits,
            block_size=m.block_size,
            iterations=m.iterations,
            temperature=m.temperature,
            rng=rng,
        )
        return Attention(function, query, key, value, kept=kept)

    def step(self, attention: Attention, call: LayerCall, **options: Any) -> tuple[Array, SinkhornCache]:
        attended, past = attention(state=call.cache.past, return_state=True, count=call.count, **options)
        return attended, SinkhornCache(past, **attention.kept)

    def _sums(self, x: Float[Array, "B T D"]) -> Float[Array, "B C D"]:
        """Returns the sum of each block's inputs; in a decoder, of all inputs up to its first."""
        batch, length, width = x.shape
        count, size = self.mechanism.blocks(length), self.mechanism.block_size
        x = x.astype(jnp.float32)
        blocks = jnp.pad(x, ((0, 0), (0, count * size - length), (0, 0))).reshape(batch, count, size, width)
        if not self.dimensions.is_causal:
            return blocks.sum(2)
        before = jnp.pad(blocks[:, :-1].sum(2), ((0, 0), (1, 0), (0, 0)))
        return lax.associative_scan(jnp.add, before, axis=1) + blocks[:, :, 0]

    def _sort_network(self, sums: Float[Array, "B R D"], count: int) -> Float[Array, "B R K C"]:
        """Returns the logits of rows for the first `count` blocks."""
        d, m = self.dimensions, self.mechanism
        # The sums are large, and the exponential of the logits would amplify bfloat16's rounding.
        exact = dataclasses.replace(d, dtype=jnp.float32, use_bias=True)
        hidden = jax.nn.relu(dense(exact, d.d_model, ("embed", "mlp"), name="sort_hidden")(sums))
        outputs = (m.blocks(m.max_length), d.num_kv_heads)
        logits = dense(exact, outputs, ("mlp", "position", "kv_heads"), name="sort_blocks")(hidden)
        return jnp.swapaxes(jax.nn.relu(logits[:, :, :count]), 2, 3)

    def _begin_blocks(self, x: Float[Array, "B T D"], call: LayerCall) -> tuple[Array, Array]:
        """Returns the new sum of the inputs, and the logits with a row for each block that begins in the new tokens."""
        length, size = x.shape[1], self.mechanism.block_size
        cache = call.cache
        numbers = jnp.arange(length, dtype=jnp.int32)
        new = call.num_new(length)
        x = jnp.where((numbers < new)[None, :, None], x.astype(jnp.float32), 0.0)
        totals = cache.total[:, None] + lax.associative_scan(jnp.add, x, axis=1)
        rows = -(-length // size)
        firsts = -call.start % size + size * jnp.arange(rows, dtype=jnp.int32)
        sums = jnp.take(totals, jnp.minimum(firsts, length - 1), axis=1)
        count = cache.sort_logits.shape[1]
        places = jnp.where(firsts < new, (call.start + firsts) // size, count)
        logits = cache.sort_logits.at[:, places].set(self._sort_network(sums, count), mode="drop")
        return totals[:, -1], logits
