"""The learning rates of muP (Yang et al. 2022, arXiv:2203.03466, table 3), from the logical axis names of the
parameters.

A network's `mup_base_width` is the width at which its learning rate was tuned. AdamW moves every entry of a weight by
about the learning rate, whatever the size of the gradient; a sum over a dimension that grows with the width then moves
by rate * width. The rates of weights that sum over such a dimension therefore shrink with it:

    vectors (norms, biases, one number a head), tables (embeddings, compressed tokens)
    and maps from inputs of fixed size                                                    1
    matrices from one width to another, and read-outs                          base_width / width
    cores of structured weights, which sum over part of the width              base_width / fan_in

The last rule comes from arXiv:2509.07963 (appendix E.1, after Qiu et al. 2024): a core that sums over few inputs may
move faster than a dense matrix. The rest of muP is the network's (`brl_jax.models.StackConfig.mup_base_width`): scores
that shrink with the head dimension, read-outs that begin at zero or, tied to the embedding, are scaled by base_width /
width."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax

from brl_jax.models import StackConfig
from train.engine.optimizer import is_bias

# Dimensions that grow with the model.
_WIDTHS = frozenset(
    ("embed", "compressed_embed", "compressed_out", "features", "mlp", "heads", "kv_heads", "head_dim")
)
_OF_A_HEAD = frozenset(("heads", "kv_heads", "head_dim"))


def make_rates(config: StackConfig) -> Callable[[Any], Any]:
    """The `rates` of an objective (`train.engine.step.Objective`) for this network."""
    if config.mup_base_width is None:
        return lambda boxed: None
    base, width = config.mup_base_width, config.d_model
    return lambda boxed: mup_rates(boxed, base_width=base, width=width)


def mup_rates(boxed: Any, *, base_width: int, width: int) -> Any:
    """The factor on the learning rate of each parameter: a pytree of floats like the unboxed parameters.

    Args:
      boxed: the parameters as `model.init` returns them, with their logical axis names, or their shapes.
      base_width: the width at which the learning rate was tuned. width: the model's.

    Raises:
      ValueError: a parameter has no axis names; the error names the parameter.
    """

    def rate(path: Any, leaf: Any) -> float:
        if not isinstance(leaf, nn.meta.AxisMetadata):
            where = jax.tree_util.keystr(path, simple=True, separator="/")
            raise ValueError(f"boxed: expected logical axis names for every parameter, got none for {where}")
        box: Any = leaf
        return 1.0 if is_bias(path) else _rate(box.names, box.value.shape, base_width, width)

    return jax.tree_util.tree_map_with_path(
        rate, boxed, is_leaf=lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)
    )


def _rate(names: Sequence[str | None], shape: Sequence[int], base_width: int, width: int) -> float:
    if "block_in" in names:
        return base_width / math.prod(size for name, size in zip(names, shape) if name == "block_in")
    own = [name for name in names if name != "layers"]
    # A kernel's inputs come first. A single dimension, or heads with their features, is a vector.
    is_vector = len(own) < 2 or set(own) <= _OF_A_HEAD
    return base_width / width if not is_vector and own[0] in _WIDTHS else 1.0
