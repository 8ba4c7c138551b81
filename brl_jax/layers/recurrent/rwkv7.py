"""RWKV-7's time mixing as a layer: a delta rule with one key for removing and another for writing."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.recurrent.delta import rwkv7_attention
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import low_rank_heads, parameter, scale_scores, to_heads
from brl_jax.layers.recurrent.convolved_layer import Convolutions, ConvolvedLayer
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig


@dataclasses.dataclass(frozen=True)
class RWKV7Config(RecurrentConfig):
    """RWKV-7 (Peng et al. 2025, arXiv:2503.14456)."""

    bidirectional: ClassVar[bool] = False
    any_head_dim: ClassVar[bool] = True
    # Tokens are mixed with the one before.
    conv_size: ClassVar[int] = 2

    rank: Count | None = None
    """Inner width of the low-rank maps to the decay, the learning rate and the gate; None for the width of a head."""
    chunk_size: Count = 128
    """Tokens in a chunk; changes time and memory, not results."""


class RWKV7(ConvolvedLayer, config=RWKV7Config):
    """`rwkv7_attention` on tokens mixed with the ones before them (section 4.1 of the paper).

    Each projection has its own mixture x_t + mu (x_(t-1) - x_t). With k = x W_k, the log decay is -exp(-1/2)
    sigmoid(tanh(x W_1) W_2 + b), the learning rate a = sigmoid(x W_3 W_4 + b), the removal key k * xi, normalised in
    each head, and the written key k * (1 + (a - 1) * alpha). The output is gate * (norm(out) + (r . (rho * key))
    value) with a norm of each head and gate = sigmoid(x W_5) W_6.

    The paper's value residual, which mixes the first layer's values into later layers' values, is left out: layers of
    a stack are alike. So is its channel mixing: the block has the network's feed-forward network.
    """

    def convolved(self) -> dict[str, tuple[int, ...]]:
        return {"shift": (self.dimensions.d_model,)}

    def convolved_attention(self, x: Float[Array, "B T D"], convolve: Convolutions) -> Attention:
        d, heads, kv_heads = self.dimensions, self.dimensions.num_heads, self.dimensions.num_kv_heads
        mixture = parameter(self, "mixture", _mixtures, (len(_POWERS), x.shape[-1]), (None, "embed"))
        change = convolve.previous(x, name="shift") - x
        mixed = {name: x + change * mu.astype(x.dtype)[None, None] for name, mu in zip(_POWERS, mixture)}

        def of_features(name: str, init: Any, number: int = kv_heads, axis: str = "kv_heads") -> Array:
            x = parameter(self, name, init, (number, d.head_dim), (axis, "head_dim"))
            return x.astype(d.dtype)[None, None]

        def low_rank(name: str, axis: Any, **options: Any) -> Array:
            return low_rank_heads(d, mixed[name], name, axis, self.mechanism.rank, **options)

        query = to_heads(d, mixed["query"], "query")
        key, value = (to_heads(d, mixed[name], name, "kv_heads") for name in ("key", "value"))
        decay = low_rank("decay", "kv_heads", inner=jnp.tanh) + of_features("decay_bias", _decay_biases)
        rate = low_rank("rate", "kv_heads") + of_features("rate_bias", nn.initializers.zeros_init())
        rate = jax.nn.sigmoid(rate)
        gate = low_rank("gate", "heads", inner=jax.nn.sigmoid)
        removal_key = key * of_features("removal", nn.initializers.ones_init())
        key = key * (1 + (rate - 1) * of_features("replacement", nn.initializers.ones_init()))
        bonus = of_features("bonus", nn.initializers.constant(-0.04), heads, "heads")
        own = jnp.sum(query * bonus * jnp.repeat(key, heads // kv_heads, axis=2), axis=-1, keepdims=True)
        own = scale_scores(own, d.head_score_factor**2)
        rule = functools.partial(
            rwkv7_attention,
            removal_key=removal_key,
            learning_rate=rate,
            log_decay=-math.exp(-0.5) * jax.nn.sigmoid(decay.astype(jnp.float32)),
            chunk_size=self.mechanism.chunk_size,
        )

        def attend(query: Array, key: Array, value: Array, **options: Any) -> Any:
            result = rule(query, key, value, **options)
            out, *state = result if options.get("return_state") else (result,)
            out = self.norm()(out) + own * jnp.repeat(value, heads // kv_heads, axis=2)
            return (out * gate, *state) if state else out * gate

        return Attention(attend, query, key, value, linear_part=rule)

    def norm(self) -> nn.Module:
        """Returns the norm of each head."""
        d, axes = self.dimensions, ("heads", "head_dim")
        return nn.LayerNorm(
            epsilon=1e-5 * d.head_dim,
            dtype=d.dtype,
            param_dtype=d.param_dtype,
            reduction_axes=-1,
            feature_axes=(-2, -1),
            scale_init=nn.with_logical_partitioning(nn.initializers.ones_init(), axes),
            bias_init=nn.with_logical_partitioning(nn.initializers.zeros_init(), axes),
            name="head_norm",
        )


#: The first shares of the token before are 1 - (channel / width)^power; by projection, as in the published networks.
_POWERS = {"query": 0.2, "decay": 0.9, "key": 0.7, "value": 0.7, "rate": 0.9, "gate": 0.2}


def _mixtures(key: Any, shape: tuple[int, int], dtype: Any) -> Array:
    place = jnp.arange(shape[1], dtype=jnp.float32)[None] / shape[1]
    return (1 - place ** jnp.asarray(list(_POWERS.values()))[:, None]).astype(dtype)


def _decay_biases(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """From factors near 1 to factors near 0.7, evenly over all features."""
    return jnp.linspace(-5.5, 0.5, math.prod(shape), dtype=dtype).reshape(shape)
