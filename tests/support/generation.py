"""A sequence that a network reads in pieces, from a decoding cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp


def in_pieces(network: Any, variables: Any, x: jax.Array, sizes: Iterable[int], **options: Any) -> Any:
    """The outputs for all pieces, and the last cache; `network` is a model, a stack or a layer."""
    step = jax.jit(lambda x, cache: network.apply(variables, x, cache=cache, **options))
    cache, outputs = network.init_cache(*x.shape[:2]), []
    for start, end in itertools.pairwise(itertools.accumulate(sizes, initial=0)):
        y, *_, cache = step(x[:, start:end], cache)
        outputs.append(y)
    return jnp.concatenate(outputs, axis=1), cache
