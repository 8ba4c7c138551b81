"""Layers with two residual streams, whose backward pass computes a layer's inputs from its outputs.

RevNet (Gomez et al. 2017, arXiv:1707.04585) and Reformer (arXiv:2001.04451, section 2.3, equations 7 to 9).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float

from brl_jax.models.block import constrain_stream

Streams = tuple[Float[Array, "B T D"], Float[Array, "B T D"]]


class Branches(NamedTuple):
    """The two functions of a layer. Each maps the layer's operands and one residual stream (B, T, D) to what is added
    to the other stream.

    Attributes:
      mix: the attention mechanism.
      transform: the feed-forward network.
    """

    mix: Callable[[Any, Array], Array]
    transform: Callable[[Any, Array], Array]


class Operands(NamedTuple):
    """What a layer's functions read in addition to a residual stream.

    Attributes:
      params: the parameters; in a stack, each has a leading axis of layers.
      keys: the random keys of dropout and the like, with the same axis.
      call: integer arrays that all layers share, such as positions.
    """

    params: Any
    keys: Any
    call: Any


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def reversible_layers(periods: Sequence[Branches], operands: Operands, streams: Streams) -> Streams:
    """Returns the streams after all layers, each y1 = x1 + mix(x2) and y2 = x2 + transform(y1) (Reformer, equation 9).

    The backward pass computes x2 = y2 - transform(y1) and x1 = y1 - mix(x2), which equal the inputs up to rounding, and
    from these the layer's gradients. Its memory therefore covers one layer and the two streams, however many layers
    there are, at the cost of one more forward pass.

    Args:
      periods: the layers that repeat; operands.params and operands.keys have one entry for each.
      operands: see `Operands`. Only params get gradients.
      streams: two arrays (B, T, D).
    """

    def step(streams: Streams, layers: Any) -> tuple[Streams, None]:
        x1, x2 = streams
        for branches, (params, keys) in zip(periods, zip(*layers)):
            layer = Operands(params, keys, operands.call)
            x1 = constrain_stream(x1 + branches.mix(layer, x2))
            x2 = constrain_stream(x2 + branches.transform(layer, x1))
        return (x1, x2), None

    return jax.lax.scan(step, streams, (operands.params, operands.keys))[0]


def _forward(periods, operands, streams):
    streams = reversible_layers(periods, operands, streams)
    return streams, (operands, streams)


def _backward(periods, kept, d_streams):
    operands, streams = kept

    def step(state, layers):
        (x1, x2), (d1, d2) = state
        d_layers = []
        for branches, (params, keys) in reversed(list(zip(periods, zip(*layers)))):
            layer = Operands(params, keys, operands.call)
            x2, d1, d_transform = _undo(
                branches.transform, layer, inputs=x1, outputs=x2, d_inputs=d1, d_outputs=d2
            )
            x1, d2, d_mix = _undo(branches.mix, layer, inputs=x2, outputs=x1, d_inputs=d2, d_outputs=d1)
            d_layers.append(jax.tree.map(lambda a, b: a + b, d_transform, d_mix))
        return ((x1, x2), (d1, d2)), tuple(reversed(d_layers))

    start = (streams, d_streams)
    (_, d_streams), d_params = jax.lax.scan(step, start, (operands.params, operands.keys), reverse=True)
    return Operands(d_params, None, None), d_streams


def _undo(branch, layer, *, inputs, outputs, d_inputs, d_outputs):
    """Returns `outputs` before branch(inputs) was added to it, and the gradients of `inputs` and of the parameters."""
    added, pull = jax.vjp(lambda params, x: branch(layer._replace(params=params), x), layer.params, inputs)
    d_params, d_through = pull(d_outputs)
    return constrain_stream(outputs - added), constrain_stream(d_inputs + d_through), d_params


reversible_layers.defvjp(_forward, _backward)
