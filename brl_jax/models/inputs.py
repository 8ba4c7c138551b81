"""The first layer of every network: maps tokens or feature vectors to the model's width and adds positions."""

from __future__ import annotations

import math
from typing import Any, Literal

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from brl_jax.attention.core.checks import concrete_values, require, zero_padding
from brl_jax.layers.core.modules import dense, parameter
from brl_jax.layers.core.protocol import Dimensions, token_positions
from brl_jax.sharding import constrain

InputKind = Literal["embed", "scale", "features"]
Positions = Literal["rope", "learned", "sinusoidal", "none"]


def sinusoidal_positions(places: Int[Array, "*B T"], width: int) -> Float[Array, "*B T D"]:
    """Returns float32 sines (even features) and cosines (odd ones) of place / 10000^(i / width), where i is the even
    feature of each pair (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)."""
    feature = jnp.arange(width, dtype=jnp.int32)
    even = (feature - feature % 2).astype(jnp.float32)
    frequency = jnp.exp(even * (-math.log(1e4) / width))
    angle = places.astype(jnp.float32)[..., None] * frequency.reshape(*[1] * places.ndim, width)
    is_even = jnp.broadcast_to(feature % 2 == 0, angle.shape)
    return jnp.where(is_even, jnp.sin(angle), jnp.cos(angle))


def check_lengths(lengths: Any, shape: tuple[int, ...], longest: int) -> None:
    """Raises ValueError unless `lengths` is None or integers of `shape` in 1..longest.

    Traced values are not checked; those beyond `longest` mean all tokens.
    """
    check_ints("lengths", lengths, (shape,), within=(1, longest))


def check_ints(
    name: str, array: Any, shapes: tuple[tuple[int, ...], ...], within: tuple[int, int] | None = None
) -> None:
    """Raises ValueError unless `array` is None or integers of one of the shapes, from within[0] to within[1] unless
    they are traced."""
    if array is None:
        return
    shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", type(array).__name__)
    require(
        shape in shapes and jnp.issubdtype(dtype, jnp.integer),
        f"{name} must be integers of shape {' or '.join(map(str, dict.fromkeys(shapes)))}, got {dtype} {shape}",
    )
    known = None if within is None else concrete_values(array)
    if within is not None and known is not None:
        wrong = known[(known < within[0]) | (known > within[1])]
        require(wrong.size == 0, f"{name} must be {within[0]} to {within[1]}, got {wrong[:5].tolist()}")


def table_logits(
    dimensions: Dimensions, hidden: Float[Array, "B T D"], table: Float[Array, "V D"]
) -> Float[Array, "B T V"]:
    """Returns the float32 products of hidden states with each token's vector."""
    base = dimensions.base_width
    # muP: the table's entries do not shrink as the width grows, so the products are scaled down.
    if base is not None:
        hidden = hidden * jnp.asarray(base / dimensions.d_model, hidden.dtype)
    return jnp.einsum("btd,vd->btv", hidden, table.astype(hidden.dtype), preferred_element_type=jnp.float32)


class Inputs(nn.Module):
    """Rows (B, T, D) in the computation's dtype for tokens (B, T) ints or real features (B, T, `size`).

    Kinds:
      "embed": looks up a learned vector for each of `size` tokens and multiplies it by `embedding_scale`, by default
        the square root of the width (with muP, of the base width). With that factor one table gives both inputs and
        logits unit size; without it, the layers' outputs would drown the tokens at the start of training.
      "scale": scales a token's number to -1..1 and maps it linearly.
      "features": maps vectors of `size` numbers linearly.
    Positions "learned" and "sinusoidal" are added here, "rope" is left to the layers, and "none" leaves order out.

    Raises:
      ValueError: inputs have the wrong shape or type, are longer than `max_length`, or hold tokens outside 0..size-1.
        Traced tokens cannot be checked; outside that range they become rows of NaN.
    """

    dimensions: Dimensions
    size: int
    kind: InputKind = "embed"
    embedding_scale: float | None = None
    added: Positions = "rope"
    max_length: int | None = None

    def setup(self):
        d = self.dimensions
        if self.kind == "embed":
            width = d.d_model if d.base_width is None else d.base_width
            init = nn.initializers.normal(width**-0.5)
            shape, axes = (self.size, d.d_model), ("vocab", "embed")
            self.embedding: Any = parameter(self, "embedding", init, shape, axes, d.weight_dtype)
            self.factor = math.sqrt(width) if self.embedding_scale is None else self.embedding_scale
        else:
            axis = "pixel" if self.kind == "scale" else "inputs"
            self.embedding = dense(d, d.d_model, (axis, "embed"), name="embedding", use_bias=True)
        if self.added == "learned":
            assert self.max_length is not None
            unit = nn.initializers.normal(1.0)  # as large as the tokens
            shape = (self.max_length, d.d_model)
            self.position_table: Any = parameter(self, "positions", unit, shape, ("position", "embed"))

    def check(self, inputs: Any, lengths: Any = None) -> None:
        """Raises ValueError for inputs that the network does not accept; see the class."""
        name = "inputs" if self.kind == "features" else "tokens"
        require(
            hasattr(inputs, "shape") and hasattr(inputs, "dtype"),
            f"{name} must be an array, got {type(inputs).__name__}",
        )
        if self.kind == "features":
            require(
                inputs.ndim == 3 and 0 not in inputs.shape and inputs.shape[2] == self.size,
                f"inputs must have shape (batch, length, {self.size}), not empty, got {inputs.shape}",
            )
            require(
                jnp.issubdtype(inputs.dtype, jnp.floating) or jnp.issubdtype(inputs.dtype, jnp.integer),
                f"inputs must be real numbers, got {inputs.dtype}",
            )
        else:
            require(
                inputs.ndim == 2 and 0 not in inputs.shape,
                f"tokens must have shape (batch, length), not empty, got {inputs.shape}",
            )
            require(jnp.issubdtype(inputs.dtype, jnp.integer), f"tokens must be integers, got {inputs.dtype}")
        batch, length = inputs.shape[:2]
        require(
            self.max_length is None or length <= self.max_length,
            f"{name} must be at most max_length={self.max_length} per row, got {length}",
        )
        check_lengths(lengths, (batch,), length)
        known = None if self.kind == "features" else concrete_values(inputs)
        if known is None:
            return
        wrong = (known < 0) | (known >= self.size)
        if lengths is not None:
            ends = concrete_values(lengths)
            if ends is None:
                return
            wrong &= np.arange(length)[None] < ends[:, None]
        require(
            not wrong.any(),
            f"tokens must be 0 to vocab_size-1={self.size - 1}, got {known[wrong][:5].tolist()}",
        )

    def clear(self, inputs: Array, lengths: Int[Array, "B"] | None) -> Array:
        """Features with zeros beyond the lengths: NaN there would get into the gradient of the linear map."""
        return zero_padding(jnp.asarray(inputs), lengths) if self.kind == "features" else inputs

    def embed(self, inputs: Array) -> Float[Array, "B T D"]:
        """The rows without what is added for their positions; the inputs are not checked."""
        return self._finish(self._map(inputs))

    def place(self, inputs: Array, positions: Int[Array, "#B T"] | None = None) -> Float[Array, "B T D"]:
        """The rows with what is added for their positions, by default 0, 1, ...; the inputs are not checked."""
        x = self._map(inputs)
        if self.added == "learned":
            table = self.position_table
            added = table[None, : inputs.shape[1]] if positions is None else table[positions]
        elif self.added == "sinusoidal":
            positions = token_positions(inputs.shape[1]) if positions is None else positions
            added = sinusoidal_positions(positions, self.dimensions.d_model)
        else:
            return self._finish(x)
        return self._finish(x + added.astype(x.dtype))

    def _map(self, inputs: Array) -> Float[Array, "B T D"]:
        if self.kind == "embed":
            table = constrain(self.embedding, ("vocab", None))
            # A negative token would otherwise count from the table's end.
            x = table.at[inputs].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
            return x.astype(self.dimensions.param_dtype) * self.factor
        if self.kind == "scale":
            return self.embedding(inputs.astype(jnp.float32)[..., None] * (2.0 / max(self.size - 1, 1)) - 1.0)
        return self.embedding(inputs.astype(self.dimensions.dtype))

    def _finish(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        return constrain(x.astype(self.dimensions.dtype), ("batch", "length", "embed"))

    def __call__(self, inputs: Array, lengths: Int[Array, "B"] | None = None) -> Float[Array, "B T D"]:
        self.check(inputs, lengths)
        return self.place(self.clear(inputs, lengths))
