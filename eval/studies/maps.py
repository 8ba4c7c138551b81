"""What each mechanism of a family sees, as one picture: python -m eval.maps --family FAMILY --picture FILE.

Each panel is one layer with random parameters on random inputs: the size of the derivative of output i by input p.
White is exactly 0: no change of input p can reach output i. Derivatives show what a layer can see before training; a
trained network may look at less.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

from brl_jax.attention.core.checks import check_choice
from brl_jax.fields import Checked
from brl_jax.layers import MECHANISMS
from brl_jax.layers.core.protocol import Dimensions, Mechanism
from brl_jax.models.networks import make_stack
from eval.harness.options import command
from eval.harness.output import picture_path
from eval.harness.pictures import panels, save
from train.engine.errors import UserError

# Settings at which 64 tokens show each pattern.
SMALL: Mapping[str, Mapping[str, Any]] = {
    "local": {"window": 8},
    "brl": {"window": 8, "num_compressed": 4, "block_size": 8, "history_size": 24},
    "tlinformer": {"window": 16, "context": 8, "hidden": 0},
    "diag": {"block_size": 16},
    "linformer": {"num_projected": 8, "max_length": 64},
    "nystromformer": {"num_landmarks": 8},
    "skyformer": {"num_samples": 16},
    "long_short": {"window": 8, "num_projected": 8, "chunk_size": 8},
    "mlr": {"ranks": (4, 2, 2), "block_sizes": (None, 32, 8)},
    "bilinear_mlr": {"ranks": (4, 2)},
    "global_window": {"window": 8},
    "bsbr": {"chunk_size": 16},
    "flash": {"chunk_size": 16},
    "reformer": {"num_rounds": 1, "num_buckets": 8, "chunk_size": 8},
    "sinkhorn": {"block_size": 8, "max_length": 64},
    "synthesizer": {"max_length": 64},
    "luna": {"num_packed": 8, "chunk_size": 16},
    "mamba2": {"state_size": 16},
    "native_sparse": {"window": 8, "compressed_size": 8, "stride": 4, "selected_size": 8, "num_selected": 3},
}
# A family is a folder of layers; some have others next to them, to compare.
FAMILIES: Mapping[str, tuple[str, ...]] = {
    family: tuple(name for name, kind in MECHANISMS.items() if f".layers.{family}." in kind.__module__)
    for family in ("recurrent", "structured", "low_rank", "sorting", "dense")
} | {
    "local": ("full", "local", "global_window", "diag"),
    "compressed": ("local", "brl"),
    "tlinformer": ("full", "tlinformer"),
}


@dataclasses.dataclass(frozen=True)
class MapsOptions(Checked):
    """What to draw."""

    family: str = "local"
    """One of the families of the documentation."""
    length: int = 64
    """Tokens."""
    picture: str | None = None
    """File to draw the maps in (PNG)."""

    def __post_init__(self):
        check_choice("family", self.family, tuple(FAMILIES))
        if not 16 <= self.length <= 256:
            raise ValueError(f"length must be from 16 to 256, got {self.length}")


def small(name: str) -> Mechanism:
    """The configuration of a listed mechanism whose pattern shows within 64 tokens."""
    return MECHANISMS[name](**SMALL.get(name, {}))


def dependence(mechanism: Mechanism, length: int, *, is_causal: bool) -> Float[Array, "T T"]:
    """How far input p moves output i of one layer, or of one group of layers that belong together: the root mean square
    of the Jacobian's block (i, p), relative to the largest of row i. The residual path is on the diagonal."""
    dims = Dimensions(
        d_model=16, num_heads=2, num_kv_heads=2, head_dim=8, d_ff=16, is_causal=is_causal, ffn="relu"
    )
    stack = make_stack((mechanism,) * mechanism.group, dims)
    x = jax.random.normal(jax.random.key(0), (1, length, 16))
    variables = nn.unbox(stack.init({"params": jax.random.key(1), "samples": jax.random.key(2)}, x))

    def output(x):
        return stack.apply(variables, x)[0][0]

    # Forward mode: with jaxlib 0.10.2 on a CPU, jit(jacrev(.)) of a norm is wrong.
    jacobian = jax.jit(jax.jacfwd(output))(x)[:, :, 0]
    sizes = jnp.sqrt(jnp.mean(jnp.square(jacobian), axis=(1, 3)))
    return sizes / sizes.max(axis=1, keepdims=True)


def draw(names: Sequence[str], length: int) -> Figure:
    """One panel for each mechanism, all on one scale."""
    columns = min(len(names), 5)
    rows = -(-len(names) // columns)
    figure, axs = panels(
        rows, columns, (2.6 * columns + 1.2, 2.75 * rows), grid=None, sharex=True, sharey=True
    )
    axs = axs.ravel()
    for axes, name in zip(axs, names):
        mechanism = small(name)
        sizes = np.asarray(dependence(mechanism, length, is_causal=mechanism.causal))
        shown = np.where(sizes > 0, np.maximum(sizes, 1e-4), np.nan)
        image = axes.imshow(shown, cmap="viridis_r", norm=LogNorm(1e-4, 1))
        axes.set_title(name if mechanism.causal else f"{name} (encoder)", fontsize=10)
    for axes in axs[len(names) :]:
        axes.set_visible(False)
    for axes in axs[: len(names)][-columns:]:
        axes.set_xlabel("input p")
        axes.tick_params(labelbottom=True)
    for axes in axs[::columns]:
        axes.set_ylabel("output i")
    figure.colorbar(image, ax=list(axs), label="|dy / dx|, relative")
    return figure


@command(MapsOptions(), "eval.maps", "What each mechanism of a family sees.")
def main(options: MapsOptions) -> None:
    path = picture_path(options.picture)
    if path is None:
        raise UserError("--picture: expected the file to draw in")
    print(save(draw(FAMILIES[options.family], options.length), path))
