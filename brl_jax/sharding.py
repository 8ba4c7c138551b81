"""Meshes of devices, and the one table that maps the dimensions of arrays to mesh axes.

Parameters carry a name for each dimension ("embed", "heads"); layers name those of their activations. `RULES` maps
names to mesh axes:

    data      rows of a batch; every group of devices has all parameters
    fsdp      rows of a batch too, and the parameters' model width: gathered where a layer needs them
    sequence  tokens of a row, and the parameters' model width beside fsdp
    tensor    heads, the feed-forward width, the vocabulary

A mesh axis cuts one dimension of an array, the first whose name asks for it. The rows of an activation take fsdp, so
its width stays whole; a parameter has no rows, so its width is cut.

`with jax.set_mesh(make_mesh(config)):` around a jitted call is all that layers need; without it, or on one device, the
functions here that layers call do nothing.
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
    # Never cut: too short, or another dimension of the same array is cut.
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

# Where parameters and their moments are kept, a dimension that is cut over the first axis is cut over the second too.
# Layers use them without that cut (`gather_parameter`): the second axis cuts the tokens that a layer computes on.
_KEPT_OVER = ("fsdp", "sequence")

# Dimensions that stay whole where the mesh axis does not divide them; for the others that is an error. The data, not
# the user, decide the size of the vocabulary and the length of a text.
_MAY_STAY_WHOLE = frozenset(("vocab", "position"))

# Neighbours that share one copy of the parameters by default: the chips of one or two hosts.
_NEIGHBOURS = 8

Names = Sequence[str | None]


@dataclasses.dataclass(frozen=True)
class MeshConfig(Checked):
    """Number of devices along each axis of the mesh; one size may be -1, for the devices that the others leave."""

    data: int | None = None
    """Groups of devices, each with a whole copy of the parameters and the optimiser state and its share of the rows.
    None: the devices that the other sizes leave."""
    fsdp: int | None = None
    """Devices that share the rows of a group and one copy of parameters and optimiser. None: what --mesh.data leaves;
    where that is None too, up to 8."""
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
        """The sizes of `AXES` on this number of devices.

        Raises:
          ValueError: sizes that do not multiply to it.
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
    """The mesh of a configuration over `devices` (default: all of all processes).

    Devices are laid out so that the inner axes run between neighbours: along the torus of a TPU slice, inside one host
    on GPUs. On several slices, "data" runs across them.

    Raises:
      ValueError: sizes that don't multiply to the number of devices, or a data axis that slices don't divide.
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
    """The mesh axes over which the dimensions of an array are cut; dimensions that do not divide evenly stay whole.

    Args:
      names: a name in `RULES` or None for each dimension.
      shape: the array's shape.
      sizes: sizes of the mesh axes that may be used.

    Raises:
      ValueError: a name that is not in `RULES`, or not one for each dimension.
    """
    if len(names) != len(shape):
        raise ValueError(f"names must be one for each dimension of shape {tuple(shape)}, got {tuple(names)}")
    free = {axis: size for axis, size in sizes.items() if size > 1}
    spec: list[Any] = []
    for name, size in zip(names, shape):
        if name is not None and name not in RULES:
            raise ValueError(f"names must be out of {', '.join(RULES)}, got {name!r}")
        axes = tuple(axis for axis in RULES[name] if axis in free) if name is not None else ()
        if not axes or size % math.prod(free[axis] for axis in axes):
            spec.append(None)
            continue
        for axis in axes:
            del free[axis]
        spec.append(axes if len(axes) > 1 else axes[0])
    return PartitionSpec(*spec)


def _kept_spec(names: Names, shape: Sequence[int], sizes: Mapping[str, int]) -> PartitionSpec:
    """The mesh axes over which a parameter is cut where it is kept; arguments and errors of `partition_spec`."""
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
    """Whether a parameter has one dimension, besides that of layers of which it is stacked."""
    return sum(name != "layers" for name in names) < 2


def parameter_shardings(mesh: Mesh, boxed: Any) -> Any:
    """A sharding for each parameter: a pytree like the unboxed parameters.

    What "fsdp" cuts is cut over "sequence" too, where both together divide it; see `gather_parameter`. Vectors (norms,
    biases, one number for each head) stay whole: gathering them costs more than storing them.

    Args:
      boxed: parameters with their names, as `model.init` returns them, or their shapes.

    Raises:
      ValueError: a dimension that its mesh axes do not divide; the error names the parameter and both sizes.
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
    """Number of shards of the rows of a batch."""
    return math.prod(dict(mesh.shape)[axis] for axis in RULES["batch"])


# --- What layers call ---


def _automatic_axes() -> dict[str, int]:
    """Axis sizes of the mesh around this trace; empty where the compiler has nothing to partition."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or set(mesh.axis_names) != set(AXES) or set(mesh.axis_types) != {AxisType.Auto}:
        return {}  # no mesh, a mesh of the caller's own, or inside shard_map
    return {name: size for name, size in mesh.shape.items() if size > 1}


def current_shards(name: str) -> int:
    """Number of shards of dimensions with this name in `RULES`, where they divide evenly; 1 without a mesh."""
    sizes = _automatic_axes()
    return math.prod(sizes.get(axis, 1) for axis in RULES[name])


def sequence_axis(length: int, block: int = 1) -> str | None:
    """The mesh axis over which sequences of `length` tokens are cut; None where they stay whole.

    Over such an axis `shard_call` may cut dimensions named "length" (and "blocks", with an entry for each `block`
    tokens), and functions of stretches (`brl_jax.attention.local.sharded`) fetch from other devices by its name.

    Args:
      length: number of tokens.
      block: how many of them must stay together on one device.
    """
    (axis,) = RULES["length"]
    size = current_shards("length")
    return axis if size > 1 and length % (size * block) == 0 else None


def constrain(x: jax.Array, names: Names) -> jax.Array:
    """x, sharded over the mesh by the names of its dimensions; x itself without a mesh.

    Args:
      names: a name in `RULES`, or None (whole), for each dimension.
    """
    sizes = _automatic_axes()
    if not sizes:
        return x
    return jax.lax.with_sharding_constraint(x, partition_spec(names, x.shape, sizes))


def gather_parameter(x: jax.Array, names: Names) -> jax.Array:
    """A parameter as a layer uses it: gathered over the devices that share a row's tokens; x itself without any.

    Left to itself, the compiler may move activations to the parts of a parameter, which is far more than the parameter
    where rows are long. The gradient is summed and cut as the parameter is kept.

    Args:
      names: those of the parameter's dimensions, without the one of stacked layers.

    Raises:
      ValueError: as `partition_spec` does.
    """
    sizes = _automatic_axes()
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
    # In two steps: a product asked for a gradient that is cut over the tokens' axis might gather its operands, the
    # tokens, where it can sum over them. The compiler makes one exchange of the sum and the cut.
    gradient = jax.lax.with_sharding_constraint(gradient, used)
    return (jax.lax.with_sharding_constraint(gradient, kept),)


_gather.defvjp(_gather_forward, _gather_backward)


def shard_call(
    function: Callable[..., Any],
    operands: Sequence[Any],
    names: Sequence[Names],
    out_names: Names | tuple[Names, ...],
) -> Any:
    """function(*operands), which every device runs on its own shards.

    It serves functions that treat each row and head separately and that the compiler cannot partition (kernels), and
    functions of stretches of sequences, which fetch what they need from other devices. Without a mesh it is a plain
    call. A mesh axis that does not divide every dimension it would cut is left out; where none is left, every device
    computes the whole.

    Args:
      function: takes the shards; it must not close over arrays.
      operands: arrays or None.
      names: the names of each operand's dimensions; those of tokens only where `sequence_axis` gives the axis for
        whose stretches `function` is made.
      out_names: the names of the result's dimensions; a tuple of them for several results.
    """
    sizes = _automatic_axes()
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

    # The result's sizes need no check: its dimensions are those of the operands.
    def cut(names: Names) -> PartitionSpec:
        axes = (tuple(axis for axis in (RULES[name] if name else ()) if axis in sizes) for name in names)
        return PartitionSpec(*(found or None for found in axes))

    several = isinstance(out_names[0], tuple)
    out = tuple(map(cut, out_names)) if several else cut(out_names)  # type: ignore[arg-type]
    return jax.shard_map(function, in_specs=tuple(specs), out_specs=out)(*operands)
