"""Blocks of queries: what a scan over layers stores for them."""

import re

import jax
import jax.numpy as jnp
from jax import lax

from brl_jax.attention.core.query_blocks import by_query_blocks


def test_scan_over_layers_makes_no_mask_of_all_pairs():
    """Causal and segment masks don't depend on the layer, so JAX would hoist them out of the loop over layers."""
    length, block = 48, 16
    places = jnp.arange(length, dtype=jnp.int32)

    def layer(x, segments):
        def attend(query, segments, offset):
            scores = jnp.einsum("btnh,bsnh->bnts", query, x)
            seen = (offset + places[:block, None] >= places[None])[None]
            seen = seen & (segments[:, :, None] == places[None, None])
            weights = jax.nn.softmax(jnp.where(seen[:, None], scores, -1e9), axis=-1)
            return jnp.einsum("bnts,bsnh->btnh", weights, x)

        return by_query_blocks(attend, block, x, segments)

    def network(x, segments):
        return lax.scan(lambda x, _: (layer(x, segments), None), x, None, length=2)[0].sum()

    x = jax.ShapeDtypeStruct((1, length, 1, 4), jnp.float32)
    text = jax.jit(jax.grad(network)).lower(x, jax.ShapeDtypeStruct((1, length), jnp.int32)).as_text()
    sizes = [[int(n) for n in found.split("x")] for found in re.findall(r"tensor<(\d+(?:x\d+)*)x[a-z]", text)]
    pairs = [size for size in sizes if block in size and length in size and length // block in size]
    assert not pairs
