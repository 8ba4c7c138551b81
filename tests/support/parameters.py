"""Random parameters of a network without its initializer, which takes a second to compile."""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np


def drawn(init: Callable[..., Any], *inputs: Any, seed: int = 0, **options: Any) -> Any:
    """Parameters with the shapes that a module's `init` gives for these inputs: scales near 1, and the others as large
    as keeps outputs at the size of inputs."""
    shapes = nn.unbox(jax.eval_shape(functools.partial(init, **options), jax.random.key(0), *inputs))
    rng = np.random.default_rng(seed)

    def draw(path: Any, leaf: Any) -> jax.Array:
        noise = rng.standard_normal(leaf.shape)
        value = 1 + 0.2 * noise if path[-1].key == "scale" else noise / max(leaf.size, 1) ** 0.25
        return jnp.asarray(value, leaf.dtype)

    return jax.tree_util.tree_map_with_path(draw, shapes)
