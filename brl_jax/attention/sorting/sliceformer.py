"""Slicing and sorting in place of attention: every channel of the values is sorted by itself (Sliceformer)."""

from __future__ import annotations

from typing import Literal, get_args

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.arguments import check_dtype, check_lengths, zero_padding
from brl_jax.attention.core.boundary import attention_function
from brl_jax.attention.core.checks import check_choice, require
from brl_jax.attention.core.dispatch import Implementation, check_implementation

Order = Literal["ascending", "descending", "interleaved", "max_exchange"]


@attention_function
def sliceformer_attention(
    value: Float[Array, "B T N V"],
    *,
    order: Order = "ascending",
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """The values sorted along the sequence, each channel by itself, in O(T log T) time and memory linear in T.

    (B, T, N, V) -> (B, T, N, V)::

        out = sliceformer_attention(value)

    Sliceformer (Yuan and Xu 2023, arXiv:2310.17683). There are no queries, keys or softmax: sorting multiplies every
    channel by a permutation matrix of its own, an attention map that is sparse, doubly stochastic and of full rank. The
    gradient goes through that permutation, which is constant almost everywhere. Token i gets the values of rank i,
    which may be those of any token: there is no causal form. `reference.sliceformer_attention` is the plain form.

    Args:
      value: (B, T, N, V), float32, bfloat16 or float16.
      order: "ascending", as in the authors' code for the Long Range Arena, or "descending"; "interleaved" sorts the
        first channel of a head in ascending order, the second in descending order, and so on; "max_exchange" exchanges
        the first token's value and the largest one, in O(T), and leaves the others in place. Equal values keep their
        order.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding, which may contain anything and stays
        behind the sorted values. Padded rows give 0.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the dtype of the values.

    Raises:
      ValueError: a shape, a dtype, an order or an implementation that does not fit, naming the argument.
    """
    require(
        hasattr(value, "shape") and hasattr(value, "dtype"),
        f"value must be an array, got {type(value).__name__}",
    )
    require(value.ndim == 4, f"value must have shape (batch, length, heads, head_dim), got {value.shape}")
    require(0 not in value.shape, f"value must not be empty, got shape {value.shape}")
    check_dtype("value", value)
    check_choice("order", order, get_args(Order))
    check_implementation(implementation, None, "xla")
    batch, length = value.shape[:2]
    lengths = check_lengths("key_value_seq_lengths", key_value_seq_lengths, batch)
    value = zero_padding(value, lengths)
    places = jnp.arange(length, dtype=jnp.int32)
    exists = jnp.ones((batch, length), bool) if lengths is None else places[None] < lengths[:, None]
    keys = lax.stop_gradient(value).astype(jnp.float32)
    if order == "descending":
        keys = -keys
    elif order == "interleaved":
        keys = jnp.where(jnp.arange(value.shape[3])[None, None, None] % 2 == 1, -keys, keys)
    places = jnp.broadcast_to(places[None, :, None, None], value.shape)
    if order == "max_exchange":
        largest = (
            jnp.where(exists[..., None, None], keys, -jnp.inf).argmax(1, keepdims=True).astype(jnp.int32)
        )
        ranked = jnp.where(places == 0, largest, jnp.where(places == largest, 0, places))
    else:
        keys = jnp.where(exists[..., None, None], keys, jnp.inf)
        ranked = lax.sort((keys, places), dimension=1, is_stable=True, num_keys=1)[1]
    return zero_padding(jnp.take_along_axis(value, ranked, axis=1), lengths)
