"""Gated DeltaNet as a layer: short convolutions, then the delta rule on a decaying state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.recurrent.delta import DeltaState, gated_delta_rule, init_delta_state
from brl_jax.fields import Count, NonNegative
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import dense, gated_output, to_heads
from brl_jax.layers.core.protocol import Dimensions
from brl_jax.layers.recurrent.convolved_layer import Convolutions, ConvolvedLayer
from brl_jax.layers.recurrent.decay import step_decay
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig


@dataclasses.dataclass(frozen=True)
class GatedDeltaNetConfig(RecurrentConfig):
    """The gated delta rule (Yang et al. 2024, arXiv:2412.06464), as in Qwen3-Next."""

    bidirectional: ClassVar[bool] = False
    any_head_dim: ClassVar[bool] = True

    num_key_heads: Count | None = None
    """Heads of queries and keys; None for the network's key/value heads."""
    num_value_heads: Count | None = None
    """Heads of values, each with a separate state and decay; a multiple of num_key_heads. None for the network's query
    heads."""
    key_dim: Count | None = None
    """Width of a query or key head; None for the network's."""
    value_dim: Count | None = None
    """Width of a value head; None for the network's."""
    negative_eigenvalues: bool = False
    """Whether beta reaches 2 instead of 1, so that a token can also reverse what the state stores for its key (Grazzi
    et al. 2024, arXiv:2411.12537; OLMo Hybrid)."""
    norm_epsilon: NonNegative | None = None
    """Added to the mean square of a head's output; None for the network's."""
    conv_size: Count = 4
    """Width in tokens of the convolutions of queries, keys and values."""

    def check(self, dimensions: Dimensions) -> None:
        super().check(dimensions)
        keys, values, *_ = self.sizes(dimensions)
        if values % keys:
            raise ValueError(f"num_value_heads must be a multiple of num_key_heads={keys}, got {values}")

    def sizes(self, dimensions: Dimensions) -> tuple[int, int, int, int]:
        """Returns key heads, value heads, and the widths of a key and of a value."""
        d = dimensions
        return (
            self.num_key_heads or d.num_kv_heads,
            self.num_value_heads or d.num_heads,
            self.key_dim or d.head_dim,
            self.value_dim or d.head_dim,
        )


class GatedDeltaNet(ConvolvedLayer, config=GatedDeltaNetConfig):
    """`gated_delta_rule` on convolved projections, followed by a gated norm of each head.

    For each value head, beta = sigmoid(x W_b), or twice that with negative_eigenvalues, and the log decay is -exp(rate)
    softplus(x W_a + step_bias). Queries and keys are normalised, and queries divided by sqrt(key_dim). Consecutive
    groups of num_value_heads / num_key_heads value heads share a key head. It uses no rotary positions: the recurrence
    already depends on the order.
    """

    def convolved(self) -> dict[str, tuple[int, ...]]:
        keys, values, key_dim, value_dim = self.mechanism.sizes(self.dimensions)
        return {
            "query_conv": (keys, key_dim),
            "key_conv": (keys, key_dim),
            "value_conv": (values, value_dim),
        }

    def init_state(self, batch: int, length: int) -> DeltaState:
        _, values, key_dim, value_dim = self.mechanism.sizes(self.dimensions)
        return init_delta_state(batch, values, key_dim, value_dim)

    def convolved_attention(self, x: Float[Array, "B T D"], convolve: Convolutions) -> Attention:
        d = self.dimensions
        keys, values, key_dim, value_dim = self.mechanism.sizes(d)

        def project(name: str, axis: Any, heads: int, size: int) -> Array:
            projected = to_heads(d, x, name, axis, number=heads, size=size)
            return convolve(projected, axis, "head_dim", name=f"{name}_conv")

        query, key = (unit(project(name, "kv_heads", keys, key_dim)) for name in ("query", "key"))
        query = query * jnp.asarray(key_dim**-0.5, query.dtype)
        value = project("value", "heads", values, value_dim)
        query, key = (jnp.repeat(y, values // keys, axis=2) for y in (query, key))
        beta = jax.nn.sigmoid(dense(d, values, ("embed", "heads"), name="beta")(x))
        if self.mechanism.negative_eigenvalues:
            beta = 2 * beta
        steps = dense(d, values, ("embed", "heads"), name="step", use_bias=False)(x)
        function = functools.partial(
            gated_delta_rule,
            beta=beta,
            log_decay=step_decay(self, steps, ("heads",))[0],
            normalize_keys=False,
            chunk_size=self.mechanism.chunk_size,
        )
        return Attention(function, query, key, value)

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N V"]) -> Float[Array, "B T D"]:
        d = self.dimensions
        epsilon = self.mechanism.norm_epsilon
        return gated_output(
            d if epsilon is None else dataclasses.replace(d, norm_epsilon=epsilon), x, attended
        )


def unit(x: Float[Array, "*B H"]) -> Float[Array, "*B H"]:
    """Returns x divided by its l2 norm over the last axis, computed in float32; a zero vector stays zero."""
    wide = x.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.sum(jnp.square(wide), axis=-1, keepdims=True) + 1e-6)).astype(x.dtype)
