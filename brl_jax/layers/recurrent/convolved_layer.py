"""The base of recurrent layers with short convolutions, whose recent inputs a decoding cache keeps."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from brl_jax.attention.recurrent.delta import init_delta_state
from brl_jax.attention.recurrent.short_convolution import short_convolution
from brl_jax.layers.core.attention_layer import Attention
from brl_jax.layers.core.modules import parameter
from brl_jax.layers.core.protocol import LayerCall
from brl_jax.layers.recurrent.recurrent_layer import RecurrentLayer


class ConvolvedCache(NamedTuple):
    """A `StateCache` of a layer with short convolutions.

    Attributes:
      recent: for each convolution, by name, its last size - 1 inputs (B, size - 1, ...).
    """

    state: Any
    recent: Mapping[str, Float[Array, "B R ..."]]
    length: Int[Array, ""]


class ShortConvolution(nn.Module):
    """SiLU of `short_convolution`, with a kernel (size, ...) over the last `size` tokens of every channel.

    As in the published networks, kernels start uniform within 1 / sqrt(size). The optional bias starts at zero.
    """

    dimensions: Any
    axes: tuple[str | None, ...]
    size: int
    use_bias: bool = False

    @nn.compact
    def __call__(
        self,
        x: Float[Array, "B T ..."],
        recent: Float[Array, "B R ..."] | None = None,
        segment_ids: Int[Array, "B T"] | None = None,
        count: Any = None,
    ) -> tuple[Float[Array, "B T ..."], Float[Array, "B R ..."] | None]:
        """Returns the outputs and the new recent inputs; the arguments are `short_convolution`'s."""
        channels = x.shape[2:]
        bound = self.size**-0.5

        def uniform(key: Any, shape: Any, dtype: Any) -> Array:
            return jax.random.uniform(key, shape, dtype, -bound, bound)

        kernel = parameter(self, "kernel", uniform, (self.size, *channels), (None, *self.axes))
        bias = None
        if self.use_bias:
            bias = parameter(self, "bias", nn.initializers.zeros_init(), channels, self.axes)
        y, recent = short_convolution(x, kernel, bias, segment_ids=segment_ids, recent=recent, count=count)
        return jax.nn.silu(y), recent


class Convolutions:
    """The short convolutions of one call of a layer; `recent` collects the inputs for its cache."""

    def __init__(self, dimensions: Any, size: int, call: LayerCall):
        self._dimensions = dimensions
        self._size = size
        self._call = call
        self._before = None if call.cache is None else call.cache.recent
        self.recent: dict[str, Any] = {}

    def __call__(
        self, x: Float[Array, "B T ..."], *axes: str | None, name: str, use_bias: bool = False
    ) -> Float[Array, "B T ..."]:
        """Applies `ShortConvolution` to x, whose dimensions after the length have the logical names `axes`."""
        module = ShortConvolution(self._dimensions, axes, self._size, use_bias, name=name)
        before = None if self._before is None else self._before[name]
        y, self.recent[name] = module(x, before, self._call.segment_ids, self._call.count)
        return y

    def previous(self, x: Float[Array, "B T D"], *, name: str) -> Float[Array, "B T D"]:
        """Returns the token before each token; zeros before the first of a sequence."""
        before = None if self._before is None else self._before[name]
        kernel = jnp.broadcast_to(jnp.asarray([[1.0], [0.0]], x.dtype), (2, x.shape[-1]))
        call = self._call
        y, self.recent[name] = short_convolution(
            x, kernel, segment_ids=call.segment_ids, recent=before, count=call.count
        )
        return y


class ConvolvedLayer(RecurrentLayer):
    """A `RecurrentLayer` with short convolutions over `mechanism.conv_size` tokens.

    A mechanism implements `convolved_attention`, and overrides `output` if it does more than merge the heads. By
    default the state is that of the delta rules, and queries, keys and values are convolved.
    """

    def init_state(self, batch: int, length: int) -> Any:
        return init_delta_state(batch, self.dimensions.num_kv_heads, self.dimensions.head_dim)

    def convolved(self) -> dict[str, tuple[int, ...]]:
        """Returns the names of the convolutions, and the shape of a token in each."""
        d = self.dimensions
        heads = {"query": d.num_heads, "key": d.num_kv_heads, "value": d.num_kv_heads}
        return {f"{name}_conv": (number, d.head_dim) for name, number in heads.items()}

    def convolved_attention(self, x: Float[Array, "B T D"], convolve: Convolutions) -> Attention:
        """`AttentionLayer.attention`; it must call convolve(array, *axes, name=...), or its `previous`,
        once for each name."""
        raise NotImplementedError

    def init_cache(self, batch: int, length: int) -> ConvolvedCache:
        d, reach = self.dimensions, self.mechanism.conv_size - 1
        recent = {
            name: jnp.zeros((batch, reach, *shape), d.dtype) for name, shape in self.convolved().items()
        }
        return ConvolvedCache(self.init_state(batch, length), recent, jnp.zeros((), jnp.int32))

    def attention(self, x: Float[Array, "B T D"], call: LayerCall) -> Attention:
        convolve = Convolutions(self.dimensions, self.mechanism.conv_size, call)
        return self.convolved_attention(x, convolve)._replace(kept={"recent": convolve.recent})
