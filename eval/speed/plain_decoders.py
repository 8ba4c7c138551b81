"""The cached step of a plain decoder as TLinFormer's authors measured it (arXiv:2508.20407, section 6.4).

Their text explains the baseline's small gain from its cache by torch.cat, which copies the cache at each step. Their
program does more: it caches the queries as well, and gives every token of the text its row of each layer again, as if
only the projections to queries, keys and values were worth keeping. Here are both, on the parameters of a `DecoderLM`
with full attention in all layers. A step returns the logits of the new token and a new, longer cache.
"""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax import full_attention
from brl_jax.attention.core.rotary import rotate
from brl_jax.layers.core.modules import FeedForward, norm
from brl_jax.models import DecoderLM


def concatenated_step(model: DecoderLM, length: int, params: Any, tokens: Int[Array, "1 1"], cache: Any):
    """A step whose cache, of exactly `length` tokens, is copied into one for a token more."""
    longer = model.init_cache(1, length + 1)

    def grow(old: Array, new: Array) -> Array:
        if old.ndim == 0:
            return old
        return jnp.pad(old, [(0, after - before) for before, after in zip(old.shape, new.shape)])

    grown = jax.tree.map(grow, cache, longer)._replace(room=longer.room)
    return model.apply(params, tokens, cache=grown)


def empty_rows(model: DecoderLM, length: int) -> tuple[Array, Array, Array]:
    """Queries, keys and values of `length` tokens in all layers, zeros (L, 1, T, N, H)."""
    d, layers = model.config.dimensions, model.config.num_layers
    rows = jnp.zeros((layers, 1, length, d.num_heads, d.head_dim), d.dtype)
    return rows, rows, rows


def reread_step(
    model: DecoderLM, params: Any, tokens: Int[Array, "1 T"], rows: tuple[Array, Array, Array]
) -> tuple[Float[Array, "1 1 V"], tuple[Array, Array, Array]]:
    """A step after T - 1 tokens that computes all T rows of every layer, with the cached rows' queries, keys and
    values."""
    d, apply = model.config.dimensions, cast(Any, model.apply)
    theta = cast(float, d.rope_theta)
    place = jnp.full((1, 1), tokens.shape[1] - 1, jnp.int32)

    def normed(weights: Any, x: Array) -> Any:
        return norm(d, name="norm").apply({"params": weights}, x)

    def layer(x: Array, inputs: Any) -> tuple[Array, Any]:
        w, *before = inputs
        mixer = w["mixer"]
        read = normed(w["mixer_norm"], x[:, -1:])

        def project(name: str) -> Array:
            made = jnp.einsum("btd,dnh->btnh", read, mixer[name]["kernel"]) + mixer[name]["bias"][None, None]
            return made if name == "value" else rotate(made, place, theta)

        now = [
            jnp.concatenate([old, project(name)], axis=1)
            for old, name in zip(before, ("query", "key", "value"))
        ]
        attended = full_attention(*now, is_causal=True)
        x = (
            x
            + jnp.einsum("btnh,nhd->btd", attended, mixer["out"]["kernel"])
            + mixer["out"]["bias"][None, None]
        )
        read = normed(w["feed_forward_norm"], x)
        fed: Any = FeedForward(d).apply({"params": w["feed_forward"]}, read)
        return x + fed, tuple(now)

    stack = params["params"]["stack"]
    x = apply(params, tokens, method=lambda module, tokens: module.inputs.embed(tokens))
    x, rows = jax.lax.scan(layer, x, (stack["layers_0"]["block_0"], *rows))
    return apply(params, normed(stack["final_norm"], x[:, -1:]), method="logits"), rows
