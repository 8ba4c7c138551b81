"""Mamba-2's layer: a state space model whose state decays by one factor for each head and token."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from brl_jax.attention.recurrent.linear import LinearState, init_linear_state, linear_attention
from brl_jax.fields import Count
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import dense, merge_heads, parameter, to_heads
from brl_jax.layers.core.protocol import Dimensions, Residual
from brl_jax.layers.recurrent.convolved_layer import Convolutions, ConvolvedLayer
from brl_jax.layers.recurrent.decay import step_decay
from brl_jax.layers.recurrent.recurrent_layer import RecurrentConfig


@dataclasses.dataclass(frozen=True)
class Mamba2Config(RecurrentConfig):
    """Mamba-2 (Dao and Gu 2024, arXiv:2405.21060).

    A layer includes its feed-forward network, so d_ff has no effect. It has `expansion` times the network's heads."""

    bidirectional: ClassVar[bool] = False
    residual: ClassVar[Residual] = "mixer"

    expansion: Count = 2
    """Width inside the layer, as a multiple of the model's width."""
    state_size: Count = 128
    """Features of B and C [N], the queries and keys of linear attention."""
    num_groups: Count = 1
    """Number of distinct B and C, each shared by a group of heads."""
    conv_size: Count = 4
    """Width in tokens of the short convolutions."""
    # Chunks of 64 would double the wide states that the backward pass keeps.
    chunk_size: Count = 128
    """Tokens in a chunk; changes time and memory, not results."""

    def check(self, dimensions: Dimensions) -> None:
        super().check(dimensions)
        heads = self.expansion * dimensions.num_heads
        if heads % self.num_groups:
            raise ValueError(f"num_groups must divide the {heads} heads of Mamba-2, got {self.num_groups}")


class Mamba2(ConvolvedLayer, config=Mamba2Config):
    """y = SSD(x, B, C) + D x, then norm(y * swish(z)) W (section 7.1 and figure 6).

    x, B and C are projections followed by short convolutions and SiLU. With dt = softplus(...) for each head and token,
    the state decays by exp(-exp(rate) dt); B is its key, dt x its value and C its query. The norm is over the heads
    of a group together, as in the published weights.
    """

    @property
    def num_heads(self) -> int:
        """Heads of x, each of the network's head dimension."""
        return self.mechanism.expansion * self.dimensions.num_heads

    def init_state(self, batch: int, length: int) -> LinearState:
        d, m = self.dimensions, self.mechanism
        return init_linear_state(batch, self.num_heads, m.state_size, d.head_dim, normalize=False)

    def convolved(self) -> dict[str, tuple[int, ...]]:
        m = self.mechanism
        groups = (m.num_groups, m.state_size)
        return {"x_conv": (self.num_heads, self.dimensions.head_dim), "B_conv": groups, "C_conv": groups}

    def convolved_attention(self, x: Float[Array, "B T D"], convolve: Convolutions) -> Attention:
        d, m = self.dimensions, self.mechanism
        inner = convolve(self._project(x, "x"), "heads", "head_dim", name="x_conv", use_bias=True)

        def grouped(name: str) -> Array:
            axes = ("embed", "groups", "head_dim")
            y = dense(d, (m.num_groups, m.state_size), axes, name=name)(x)
            y = convolve(y, "groups", "head_dim", name=f"{name}_conv", use_bias=True)
            return jnp.repeat(y, self.num_heads // m.num_groups, axis=2)

        key, query = grouped("B"), grouped("C")
        steps = dense(d, self.num_heads, ("embed", "heads"), name="step", use_bias=False)(x)
        log_decay, steps = step_decay(self, steps, ("heads",), slowest=1.0)
        skip = parameter(self, "skip", nn.initializers.ones_init(), (self.num_heads,), ("heads",))

        def attend(query: Array, key: Array, value: Array, **options: Any) -> Any:
            out = linear_attention(
                query,
                key,
                (steps[..., None] * value).astype(d.dtype),
                log_decay=log_decay,
                is_causal=True,
                normalize=False,
                feature_map="identity",
                chunk_size=m.chunk_size,
                **options,
            )
            skipped = skip.astype(d.dtype)[None, None, :, None] * value
            return (out[0] + skipped, out[1]) if options.get("return_state") else out + skipped

        return Attention(attend, query, key, inner)

    def output(self, x: Float[Array, "B T D"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        d = self.dimensions
        gated = attended * jax.nn.silu(self._project(x, "gate"))
        groups = gated.reshape(*x.shape[:2], self.mechanism.num_groups, -1, d.head_dim)
        norm = nn.RMSNorm(d.norm_epsilon, d.dtype, use_scale=False, reduction_axes=(-2, -1))
        sizes = (self.num_heads, d.head_dim)
        scale = parameter(self, "norm_scale", nn.initializers.ones_init(), sizes, ("heads", "head_dim"))
        return merge_heads(d, norm(groups).reshape(gated.shape) * scale.astype(d.dtype)[None, None])

    def _project(self, x: Float[Array, "B T D"], name: str) -> Float[Array, "B T N H"]:
        return to_heads(self.dimensions, x, name, number=self.num_heads)
