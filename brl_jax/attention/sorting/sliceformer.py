"""Sliceformer: sorts every channel of the values, instead of attending (Yuan and Xu 2023, arXiv:2310.17683)."""

from __future__ import annotations

from typing import Literal

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import check_dtype, check_lengths, check_qkv, zero_padding
from brl_jax.attention.core.decorators import divided
from brl_jax.attention.core.dispatch import Implementation, check_implementation
from brl_jax.attention.core.on_mesh import whole_rows

Order = Literal["ascending", "descending", "interleaved", "max_exchange"]


@divided(whole_rows("value"))
def sliceformer_attention(
    value: Float[Array, "B T N V"],
    *,
    order: Order = "ascending",
    key_value_seq_lengths: Int[Array, " B"] | None = None,
    implementation: Implementation | None = None,
) -> Float[Array, "B T N V"]:
    """Sorts the values along the sequence, each channel separately, in O(T log T) time and memory linear in T.

    (B, T, N, V) -> (B, T, N, V)::

        out = sliceformer_attention(value)

    Sliceformer (Yuan and Xu 2023, arXiv:2310.17683) has no queries, keys or softmax. Sorting multiplies each
    channel by a permutation matrix, an attention map that is sparse, doubly stochastic and full-rank. The gradient
    goes through that permutation, which is constant almost everywhere. Token i gets the values of rank i, which may
    come from any token, so it has no causal form.

    Args:
      value: (B, T, N, V), float32, bfloat16 or float16.
      order: "ascending", as in the authors' code for the Long Range Arena; "descending"; "interleaved", which sorts
        a head's first channel in ascending order, the second in descending order, and so on; or "max_exchange",
        which swaps the first token's value with the largest one, in O(T). Equal values keep their order.
      key_value_seq_lengths: (B,) ints; tokens at and after the length are padding. Padding may contain anything,
        stays behind the sorted values, and gives 0.
      implementation: None or "xla".

    Returns:
      (B, T, N, V) in the dtype of the values.

    Raises:
      ValueError: an argument does not fit, named in the message.
    """
    check_qkv(value, value, value, ("value",) * 3)
    check_dtype("value", value)
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
