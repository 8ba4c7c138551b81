"""Sizes of meshes, and which mesh axis divides each dimension; tests/train/test_devices.py checks the numbers."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from brl_jax.layers import MECHANISMS
from brl_jax.models import Classifier, DecoderConfig, DecoderLM, EncoderConfig
from brl_jax.sharding import (
    AXES,
    RULES,
    MeshConfig,
    constrain,
    make_mesh,
    parameter_shardings,
    partition_spec,
    sequence_axis,
    shard_call,
)


@pytest.mark.parametrize(
    ("given", "devices", "sizes"),
    [
        ({}, 1, (1, 1, 1, 1)),
        ({}, 8, (1, 8, 1, 1)),
        ({}, 12, (2, 6, 1, 1)),
        ({}, 256, (32, 8, 1, 1)),
        ({"data": 8}, 8, (8, 1, 1, 1)),
        ({"data": 2}, 32, (2, 16, 1, 1)),
        ({"fsdp": 4}, 32, (8, 4, 1, 1)),
        ({"tensor": 4}, 256, (8, 8, 1, 4)),
        ({"sequence": 8}, 8, (1, 1, 8, 1)),
        ({"fsdp": -1}, 32, (1, 32, 1, 1)),
        ({"data": -1}, 32, (32, 1, 1, 1)),
        ({"data": 2, "sequence": -1}, 8, (2, 1, 4, 1)),
        ({"data": 2, "fsdp": 2, "tensor": -1}, 8, (2, 2, 1, 2)),
    ],
)
def test_what_is_left_out_is_filled_in(given, devices, sizes):
    assert MeshConfig(**given).sizes(devices) == sizes


@pytest.mark.parametrize(
    "given", [{"data": 3}, {"data": 16}, {"data": 2, "fsdp": 2}, {"tensor": 5}, {"fsdp": -1, "data": 3}]
)
def test_sizes_that_do_not_multiply_are_refused(given):
    words = ".*".join(f"{name} {size}" for name, size in sorted(given.items()))
    with pytest.raises(ValueError, match=f"mesh: expected sizes that multiply to the 8 devices, got {words}"):
        MeshConfig(**given).sizes(8)


@dataclasses.dataclass(frozen=True)
class _Device:
    id: int
    platform: str = "cpu"
    device_kind: str = "cpu"
    process_index: int = 0

    @property
    def slice_index(self):
        return self.id % 2


def test_only_data_runs_across_slices():
    devices = [_Device(i) for i in range(8)]
    mesh = make_mesh(MeshConfig(data=4), devices)
    assert [[device.id for device in row.flat] for row in mesh.devices] == [[0, 2], [4, 6], [1, 3], [5, 7]]
    with pytest.raises(ValueError, match=r"mesh.data must be a multiple of the 2 slices, got 1"):
        make_mesh(MeshConfig(fsdp=8), devices)


@pytest.mark.parametrize(
    ("names", "shape", "spec"),
    [
        (("batch", "length", "embed"), (16, 40, 32), (("data", "fsdp"), "sequence", None)),
        (("batch", "length", "heads", None), (16, 40, 6, 8), (("data", "fsdp"), "sequence", "tensor", None)),
        (("embed", "mlp"), (32, 64), ("fsdp", "tensor")),
        (("layers", "heads", "head_dim", "embed"), (2, 4, 8, 32), (None, "tensor", None, "fsdp")),
        (("vocab", "embed"), (257, 32), (None, "fsdp")),
        (("batch",), (6,), (None,)),
    ],
)
def test_each_mesh_axis_cuts_one_dimension_that_it_divides(names, shape, spec):
    sizes = {"data": 2, "fsdp": 4, "sequence": 2, "tensor": 2}
    assert partition_spec(names, shape, sizes) == PartitionSpec(*spec)


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match=r"names must be among batch, length, .*got 'haeds'"):
        partition_spec(("haeds",), (4,), {"tensor": 2})
    with pytest.raises(ValueError, match="one for each dimension"):
        partition_spec(("heads",), (4, 4), {"tensor": 2})


def _mesh(**sizes):
    return AbstractMesh(
        tuple(sizes.get(axis, 1) for axis in AXES), AXES, axis_types=(AxisType.Auto,) * len(AXES)
    )


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_matrix_of_every_mechanism_has_a_place(name):
    """Its names are in the table, and 2 x 2 devices divide each matrix."""
    mechanism = MECHANISMS[name]()
    layers = 2 * mechanism.group
    sizes = {"num_layers": layers, "d_model": 32, "num_heads": 4, "d_ff": 64, "mechanism": mechanism}
    if mechanism.causal:
        model = DecoderLM(DecoderConfig(**sizes))
    else:
        model = Classifier(EncoderConfig(**sizes, max_length=1024))
    boxed = jax.eval_shape(
        lambda key: model.init(key, jnp.zeros((1, 1), jnp.int32))["params"], jax.random.key(0)
    )
    places = parameter_shardings(_mesh(fsdp=2, tensor=2), boxed)
    # The sequence axis divides the same dimensions as fsdp.
    fsdp, sequence = (
        jax.tree.leaves(parameter_shardings(_mesh(**{axis: 2}), boxed)) for axis in ("fsdp", "sequence")
    )
    renamed = [
        PartitionSpec(*("sequence" if part == "fsdp" else part for part in place.spec)) for place in fsdp
    ]
    assert [place.spec for place in sequence] == renamed
    for (path, leaf), place in zip(
        jax.tree_util.tree_leaves_with_path(nn.unbox(boxed)), jax.tree.leaves(places)
    ):
        shares = np.prod(leaf.shape) / np.prod(place.shard_shape(leaf.shape))
        # Neither vectors of the layers nor small stacks of vectors.
        if leaf.size > layers * 32 * 16 or jax.tree_util.keystr(path).endswith("['left']"):
            assert shares > 1, jax.tree_util.keystr(path)


@pytest.mark.parametrize(
    ("sizes", "spec"),
    [
        ({"fsdp": 4, "sequence": 2}, (None, ("fsdp", "sequence"), None)),
        ({"sequence": 8, "tensor": 2}, (None, "sequence", "tensor")),
        ({"sequence": 16}, (None, None, None)),  # does not divide the width, so the matrix may stay whole
        ({"fsdp": 8, "sequence": 2}, (None, "fsdp", None)),
    ],
)
def test_the_sequence_axis_and_fsdp_both_divide_stored_parameters(sizes, spec):
    box = nn.LogicallyPartitioned(jnp.zeros((3, 8, 6)), ("layers", "embed", "mlp"))
    assert parameter_shardings(_mesh(**sizes), {"up": box})["up"].spec == PartitionSpec(*spec)


def test_a_width_that_the_mesh_does_not_divide_is_named():
    boxed = {"up": nn.LogicallyPartitioned(jnp.zeros((30, 64)), ("embed", "mlp"))}
    with pytest.raises(
        ValueError, match=r"mesh.fsdp: expected a divisor of 30, the dimension 'embed' of .* up, got 4"
    ):
        parameter_shardings(_mesh(fsdp=4), boxed)


@pytest.mark.parametrize(
    ("sizes", "length", "block", "axis"),
    [
        ({"sequence": 4}, 32, 1, "sequence"),
        ({"sequence": 4}, 32, 8, "sequence"),
        ({"sequence": 4}, 32, 16, None),
        ({"sequence": 4}, 30, 1, None),
        ({"data": 4}, 32, 1, None),
    ],
)
def test_sequences_are_cut_where_they_divide(sizes, length, block, axis):
    with jax.sharding.use_abstract_mesh(_mesh(**sizes)):
        assert sequence_axis(length, block) == axis


def test_without_a_mesh_nothing_happens():
    assert sequence_axis(32) is None
    x = jnp.ones((4, 3))
    assert constrain(x, ("batch", "embed")) is x
    assert shard_call(lambda x, y: (x, y), (x, None), (("batch", None), ()), ("batch", None))[0] is x


def test_every_rule_is_of_mesh_axes():
    assert {axis for axes in RULES.values() for axis in axes} == set(AXES)
