"""Meshes of devices, and the table that maps the dimensions of arrays to mesh axes.

Parameters name each of their dimensions ("embed", "heads"), and layers name the dimensions of their activations.
`RULES` maps names to mesh axes:

    data      shards the rows of a batch; every group of devices has all parameters
    fsdp      also shards the rows, and the parameters' model width, which is gathered where a layer needs it
    sequence  shards the tokens of a row, and the parameters' model width together with fsdp
    tensor    shards heads, the feed-forward width and the vocabulary

A mesh axis shards one dimension of an array, the first whose name maps to it. The rows of an activation use fsdp, so
its width stays whole; a parameter has no rows, so its width is sharded.

Layers need only a jitted call inside `with jax.set_mesh(make_mesh(config)):`. Without a mesh, or on one device, the
functions that layers call here do nothing. Attention functions divide themselves (`brl_jax.attention.core.on_mesh`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import flax.linen as nn
import jax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from brl_jax.fields import Checked

AXES = ("data", "fsdp", "sequence", "tensor")

RULES: Mapping[str, tuple[str, ...]] = {
    # Activations.
    "batch": ("data", "fsdp"),
    "length": ("sequence",),
    "blocks": ("sequence",),
    # Parameters and activations.
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "compressed_embed": ("fsdp",),
    "features": ("fsdp",),
    "position": ("fsdp",),
    # Never sharded: too short, or another dimension of the same array is sharded.
    "head_dim": (),
    "layers": (),
    "compressed": (),
    "compressed_out": (),
    "pixel": (),
    "inputs": (),
    "projected": (),
    "block_tokens": (),
    "gates": (),
    "groups": (),
    "classes": (),
    "outputs": (),
    "block_in": (),
}

# Stored parameters and their moments shard a dimension over the second axis too if the first one shards it. Layers undo
# the second (`gather_parameter`), because that axis shards the tokens that they compute on.
_KEPT_OVER = ("fsdp", "sequence")

# These dimensions stay whole if the mesh axis does not divide them; for all others that is an error. Their sizes, the
# vocabulary and the length of a text, come from the data and not from the user.
_MAY_STAY_WHOLE = frozenset(("vocab", "position"))

# By default up to this many neighbours share one copy of the parameters: the chips of one or two hosts.
_NEIGHBOURS = 8

Names = Sequence[str | None]


@dataclasses.dataclass(frozen=True)
class MeshConfig(Checked):
    """Number of devices along each axis of the mesh; one size may be -1, for all remaining devices."""

    data: int | None = None
    """Groups of devices; each has a whole copy of the parameters and the optimiser state, and its share of the rows.
    None: the devices that the other sizes leave."""
    fsdp: int | None = None
    """Devices that share a group's rows and one copy of parameters and optimiser state. None: what --mesh.data leaves;
    without it too, up to 8."""
    sequence: int = 1
    """Devices that share the tokens of a row."""
    tensor: int = 1
    """Devices that share heads and feed-forward width."""

    def __post_init__(self):
        for name in AXES:
            size = getattr(self, name)
            if size is not None and size != -1 and size < 1:
                raise ValueError(f"{name} must be at least 1, or -1 for what is left, got {size}")
        left = [name for name in AXES if getattr(self, name) == -1]
        if len(left) > 1:
            raise ValueError(
                f"{left[1]} must be at least 1 where {left[0]} is -1 and takes what is left, got -1"
            )

    def sizes(self, devices: int) -> tuple[int, ...]:
        """Returns the sizes of `AXES` on this number of devices.

        Raises:
          ValueError: the sizes do not multiply to the number of devices.
        """
        asked = {name: getattr(self, name) for name in AXES}
        given = math.prod(size for size in asked.values() if size is not None and size != -1)
        rest = devices // given
        chosen = {name: rest if size == -1 else size for name, size in asked.items()}
        if -1 in asked.values():
            chosen |= {name: 1 for name, size in asked.items() if size is None}
        elif self.fsdp is None:
            most = rest if self.data is not None else _NEIGHBOURS
            chosen["fsdp"] = max((n for n in range(1, most + 1) if rest % n == 0), default=1)
        if chosen["data"] is None:
            chosen["data"] = rest // (chosen["fsdp"] if self.fsdp is None else 1)
        if math.prod(chosen.values()) != devices:
            words = " x ".join(f"{name} {size}" for name, size in asked.items() if size not in (None, 1))
            raise ValueError(
                f"mesh: expected sizes that multiply to the {devices} devices, got {words or 'data 1'}"
            )
        return tuple(chosen[name] for name in AXES)


def make_mesh(config: MeshConfig, devices: Sequence[Any] | None = None) -> Mesh:
    """Returns the mesh of a configuration over `devices` (default: all devices of all processes).

        with jax.set_mesh(make_mesh(MeshConfig(fsdp=8))):
            state = train_step(state, batch)

    Inner axes connect neighbours: along the torus of a TPU slice, or inside one host on GPUs. With several slices,
    "data" runs across them.

    Raises:
      ValueError: the sizes do not multiply to the number of devices, or the slices do not divide the data axis.
    """
    devices = jax.devices() if devices is None else list(devices)
    sizes = config.sizes(len(devices))
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if slices > 1:
        if sizes[0] % slices:
            raise ValueError(f"mesh.data must be a multiple of the {slices} slices, got {sizes[0]}")
        inner = (sizes[0] // slices, *sizes[1:])
        across = (slices, *(1 for _ in sizes[1:]))
        grid = mesh_utils.create_hybrid_device_mesh(inner, across, devices, allow_split_physical_axes=True)
    else:
        grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def partition_spec(names: Names, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the mesh axes that shard each dimension of an array; dimensions that do not divide evenly stay whole.

    Args:
      names: for each dimension, a name in `RULES` or None.
      shape: the array's shape.
      sizes: sizes of the available mesh axes.

    Raises:
      ValueError: a name is not in `RULES`, or there is not exactly one name for each dimension.
    """
    if len(names) != len(shape):
        raise ValueError(f"names must be one for each dimension of shape {tuple(shape)}, got {tuple(names)}")
    free = {axis: size for axis, size in sizes.items() if size > 1}
    spec: list[Any] = []
    for name, size in zip(names, shape):
        if name is not None and name not in RULES:
            raise ValueError(f"names must be among {', '.join(RULES)}, got {name!r}")
        axes = tuple(axis for axis in RULES[name] if axis in free) if name is not None else ()
        if not axes or size % math.prod(free[axis] for axis in axes):
            spec.append(None)
            continue
        for axis in axes:
            del free[axis]
        spec.append(axes if len(axes) > 1 else axes[0])
    return PartitionSpec(*spec)


def _kept_spec(names: Names, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the mesh axes that shard a stored parameter; arguments and errors as in `partition_spec`."""
    spec = list(partition_spec(names, shape, sizes))
    first, second = _KEPT_OVER
    for i, (name, size) in enumerate(zip(names, shape)):
        axes = tuple(axis for axis in _KEPT_OVER if sizes.get(axis, 1) > 1)
        cut = name is not None and first in RULES[name] and spec[i] == (first if first in axes else None)
        if cut and second in axes and size % math.prod(sizes[axis] for axis in axes) == 0:
            spec[i] = axes if len(axes) > 1 else axes[0]
            break
    return PartitionSpec(*spec)


def _is_vector(names: Names) -> bool:
    """Whether a parameter has a single dimension, not counting the one that stacks layers."""
    return sum(name != "layers" for name in names) < 2


def parameter_shardings(mesh: Mesh, boxed: Any) -> Any:
    """Returns a sharding for each parameter, as a pytree like the unboxed parameters.

    Dimensions sharded over "fsdp" are sharded over "sequence" too if both together divide them; see `gather_parameter`.
    Vectors (norms, biases, one number for each head) stay whole, as gathering them costs more than storing them.

    Args:
      boxed: parameters with their names, as `model.init` returns them, or their shapes.

    Raises:
      ValueError: a mesh axis does not divide its dimension; the message names the parameter and both sizes.
    """
    sizes = dict(mesh.shape)

    def place(path: Any, leaf: Any) -> NamedSharding:
        if not isinstance(leaf, nn.meta.AxisMetadata):
            return NamedSharding(mesh, PartitionSpec())
        box: Any = leaf
        names, shape = box.names, box.value.shape
        if _is_vector(names):
            return NamedSharding(mesh, PartitionSpec())
        spec = _kept_spec(names, shape, sizes)
        used = {axis for part in spec if part for axis in ((part,) if isinstance(part, str) else part)}
        for name, size in zip(names, shape):
            axes = [
                axis for axis in (RULES[name] if name else ()) if sizes.get(axis, 1) > 1 and axis not in used
            ]
            if axes and name not in _MAY_STAY_WHOLE:
                raise ValueError(
                    f"mesh.{axes[0]}: expected a divisor of {size}, the dimension {name!r} of the parameter "
                    f"{jax.tree_util.keystr(path, simple=True, separator='/')}, got {sizes[axes[0]]}"
                )
        return NamedSharding(mesh, spec)

    is_box = lambda leaf: isinstance(leaf, nn.meta.AxisMetadata)  # noqa: E731
    return jax.tree_util.tree_map_with_path(place, boxed, is_leaf=is_box)


def row_shards(mesh: Mesh) -> int:
    """Returns the number of shards of a batch's rows."""
    return math.prod(dict(mesh.shape)[axis] for axis in RULES["batch"])


# --- Functions for layers ---


def automatic_axes() -> dict[str, int]:
    """Returns the axis sizes of the mesh around this trace; empty if the compiler has nothing to partition."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_names) != set(AXES) or set(mesh.axis_types) != {AxisType.Auto}:
        return {}  # no mesh, a mesh with other axes, or inside shard_map
    return {name: size for name, size in mesh.shape.items() if size > 1}


def current_shards(name: str) -> int:
    """Returns the number of shards of dimensions with this name, assuming that it divides them; 1 without a mesh."""
    sizes = automatic_axes()
    return math.prod(sizes.get(axis, 1) for axis in RULES[name])


def sequence_axis(length: int, block: int = 1) -> str | None:
    """Returns the mesh axis that shards sequences of `length` tokens; None if they stay whole.

    With such an axis, `shard_call` may shard dimensions named "length" (and "blocks", which have an entry for every
    `block` tokens), and functions on shards (`brl_jax.attention.local.sharded`) use its name to fetch from other
    devices.

    Args:
      length: number of tokens.
      block: how many of them must stay together on one device.
    """
    (axis,) = RULES["length"]
    size = current_shards("length")
    return axis if size > 1 and length % (size * block) == 0 else None


def constrain(x: jax.Array, names: Names) -> jax.Array:
    """Returns x sharded over the mesh by the names of its dimensions; x itself without a mesh.

    Args:
      names: for each dimension, a name in `RULES` or None (whole).
    """
    if jax.sharding.get_abstract_mesh().empty or not (sizes := automatic_axes()):
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(names, x.shape, sizes))


def gather_parameter(x: jax.Array, names: Names) -> jax.Array:
    """Returns a parameter ready for use in a layer: gathered over the devices that share a row's tokens, if any.

    Otherwise the compiler might move activations to the parts of a parameter, which is far more data if rows are long.
    The gradient is summed and sharded as the parameter is stored.

    Args:
      names: of the parameter's dimensions, without the one that stacks layers.

    Raises:
      ValueError: as `partition_spec`.
    """
    if jax.sharding.get_abstract_mesh().empty:
        return x
    sizes = automatic_axes()
    if sizes.get(_KEPT_OVER[1], 1) == 1 or _is_vector(names):
        return x
    used = partition_spec(names, x.shape, sizes)
    kept = _kept_spec(names, x.shape, sizes)
    return x if used == kept else _gather(x, used, kept)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, used: PartitionSpec, kept: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, used)


def _gather_forward(x: jax.Array, used: PartitionSpec, kept: PartitionSpec) -> tuple[jax.Array, None]:
    return _gather(x, used, kept), None


def _gather_backward(used: PartitionSpec, kept: PartitionSpec, _: None, gradient: Any) -> tuple[jax.Array]:
    # Two steps: to get a gradient sharded over the tokens' axis, a product might gather its operands, the tokens, which
    # it could instead sum over. The compiler merges the sum and the sharding into one exchange.
    gradient = jax.lax.with_sharding_constraint(gradient, used)
    return (jax.lax.with_sharding_constraint(gradient, kept),)


_gather.defvjp(_gather_forward, _gather_backward)


def shard_call(
    function: Callable[..., Any],
    operands: Sequence[Any],
    names: Sequence[Names],
    out_names: Names | tuple[Names, ...],
) -> Any:
    """Computes function(*operands) on each device's shards; a plain call without a mesh.

    It is for functions that treat each row and head separately and that the compiler cannot partition (kernels), and
    for functions on shards of sequences, which fetch what they need from other devices. It ignores a mesh axis that
    does not divide every dimension it would shard; without any axis left, every device computes everything.

    Args:
      function: takes the shards; it must not close over arrays.
      operands: arrays or None.
      names: the names of each operand's dimensions. Name tokens only if `sequence_axis` returns the axis that
        `function` expects.
      out_names: the names of the result's dimensions; a tuple of these for several results.
    """
    sizes = automatic_axes()
    if not sizes:
        return function(*operands)
    arrays = [(x.shape, dims) for x, dims in zip(operands, names) if x is not None]
    for shape, dims in arrays:
        for name, size in zip(dims, shape):
            axes = [axis for axis in (RULES[name] if name else ()) if axis in sizes]
            if size % math.prod(sizes[axis] for axis in axes):
                sizes = {axis: size for axis, size in sizes.items() if axis not in axes}
    specs = [
        PartitionSpec() if x is None else partition_spec(dims, x.shape, sizes)
        for x, dims in zip(operands, names)
    ]

    # The result's sizes need no check, as its dimensions are the operands'.
    def cut(names: Names) -> PartitionSpec:
        axes = (tuple(axis for axis in (RULES[name] if name else ()) if axis in sizes) for name in names)
        return PartitionSpec(*(found or None for found in axes))

    several = isinstance(out_names[0], tuple)
    out = tuple(map(cut, out_names)) if several else cut(out_names)  # type: ignore[arg-type]
    return jax.shard_map(function, in_specs=tuple(specs), out_specs=out)(*operands)
