"""One network on several meshes of eight devices: the same numbers, and each array on as few devices as possible."""

import functools
import re

import jax
import numpy as np
import pytest

from tests.train.meshes import LENGTH, ROWS, converted_losses

# A microbatch has ROWS rows of LENGTH tokens: an array with an entry per token has at least ROWS * LENGTH numbers. Each
# mesh takes ten seconds to compile, so every test is slow except those of errors raised before compilation.
# tests/attention/local/test_devices.py also divides sequences; tests/test_sharding.py says what each axis divides.
MESHES = ("rows", "mixed", "sequence")

pytestmark = pytest.mark.xdist_group("devices")
named_gathers = pytest.mark.skipif(
    jax.__version_info__ >= (0, 12), reason="JAX 0.12's compiler leaves out or changes the names of gathers"
)


@pytest.fixture
def result(devices):
    return functools.partial(devices.ask, "tests.train.meshes")


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_losses_equal_one_devices(result, mesh):
    np.testing.assert_allclose(result(mesh)["losses"], result("one")["losses"], rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mesh", MESHES)
def test_each_gradient_equals_one_devices(result, mesh):
    """A few wrong gradients hardly change the losses, so this compares the first step's gradients directly."""
    for name, expected in result("one")["first"].items():
        error = np.abs(result(mesh)["first"][name] - expected).max()
        assert error <= 1e-4 * np.abs(expected).max(), name


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "parts"), [("rows", (4,)), ("mixed", (2, 4)), ("sequence", (8,))])
def test_every_matrix_its_moments_and_the_memory_are_cut(result, mesh, parts):
    matrices = 0
    for name, (size, share) in result(mesh)["shares"].items():
        vector = name.rsplit("/", 1)[-1] in ("scale", "lambda", "gamma", "filled")
        if "_conv/kernel" in name:
            # Four numbers per channel: divided by heads, and too few to gather layer by layer.
            assert size / share == {"rows": 1, "mixed": 2, "sequence": 1}[mesh], name
        elif not vector:
            expected = {"rows": (8,), "mixed": (4,), "sequence": (1,)}[mesh] if "memory" in name else parts
            assert size / share in expected, name
            matrices += 1
    assert matrices > 3 * 30


def is_weight(result, shape):
    """Whether a gathered array has the shape of a layer's weights."""
    weights = {
        tuple(sorted(leaf.shape[1:] if "layers_" in name else leaf.shape))
        for name, leaf in result("one")["first"].items()
    }
    return tuple(sorted(n for n in shape if n > 1)) in weights


@named_gathers
@pytest.mark.slow
def test_only_one_layers_weights_are_gathered_at_a_time(result):
    """Gathers only the current layer's weights: no activation, no moment, no stack of layers."""
    gathered = result("rows")["gathers"]
    assert len(gathered) > 20
    for shape, where in gathered:
        assert "DecoderLM." in where, f"{shape} gathered outside of the network: {where}"
        assert is_weight(result, shape), f"{shape} is not a weight of a layer: {where}"


@named_gathers
@pytest.mark.slow
def test_windows_and_blocks_gather_no_tokens_of_other_devices(result):
    """With tokens sharded, only full attention and BRL's history of outputs (the last norm's) gather a whole row. The
    states of eight shards are gathered too."""
    # The five tokens that each of the two memories carries, padded to eight for an even split.
    carried = [2, ROWS, 8, 32]
    states = [ROWS, 8, 4, 8, 8]
    gathered = result("sequence")["gathers"]
    weights = [where for shape, where in gathered if is_weight(result, shape)]
    assert len(weights) > 20
    assert all("DecoderLM." in where for where in weights), "weights are gathered where they are used"
    whole = [
        (shape, where)
        for shape, where in gathered
        if np.prod(shape) >= ROWS * LENGTH and shape not in (carried, states) and not is_weight(result, shape)
    ]
    elsewhere = [
        (shape, where)
        for shape, where in whole
        if not re.search(r"block_[01]/|carrier|stack\._through_layers/final_norm", where)
    ]
    assert len(whole) > 2
    assert not elsewhere


def test_the_look_at_gathers_sees_them(result):
    [(shape, where)] = result("careless")
    assert sorted(shape) == [2, 32, 64]
    assert "DecoderLM." not in where


def test_a_loss_in_pieces_takes_its_part_of_each_from_every_device(result):
    for expected, got in zip(*result("pieces")):
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_weights_of_a_folder_are_read_into_their_places(result):
    pytest.importorskip("safetensors")
    # Kernels and tables; norms are whole.
    assert result("weights") == [8, 8, 8]


@pytest.mark.slow
def test_a_conversion_on_a_mesh_equals_one_devices(result):
    expected = converted_losses()
    assert expected[0][-1] < expected[0][0]
    for got in result("converted"):
        for ours, theirs in zip(got, expected, strict=True):
            np.testing.assert_allclose(ours, theirs, rtol=2e-3)


@pytest.mark.slow
def test_low_rank_changes_equal_one_devices(result):
    """The optimizer holds the changes alone, and the weights that stay as they are keep their places."""
    (losses, first, _), (got, gradients, parts) = result("low rank")
    np.testing.assert_allclose(got, losses, rtol=1e-4)
    assert {name.rsplit("/", 1)[-1] for name in gradients} == {"lora_down", "lora_up"}
    for name, expected in first.items():
        assert np.abs(gradients[name] - expected).max() <= 1e-4 * np.abs(expected).max(), name
    kernels = [number for name, number in parts.items() if name.endswith("/kernel") and "_conv" not in name]
    changes = [number for name, number in parts.items() if "lora" in name]
    assert set(kernels) == {4.0}
    assert len(changes) == 2 * len(kernels)
    assert set(changes) <= {1.0, 2.0}
    assert changes.count(2.0) > len(kernels)


@pytest.mark.slow
def test_packed_rows_of_an_encoder_equal_one_devices(result):
    for expected, got in zip(*result("packed"), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_what_devices_cannot_share_is_refused(result):
    """A window may be longer than a device's part of the row, so it is not among the refused options."""
    length, block, shared, rows, width = result("refused").values()
    assert length == "--length: expected a multiple of --mesh.sequence 8, got 100"
    each = "--mechanism.block_size must divide the 64 tokens of a row that each of 8 devices has, got 48"
    assert block == f"--mesh.sequence 8: {each}"
    assert shared.endswith("block_size must be a multiple of the 8 devices that share each block, got 100")
    assert rows.startswith("--batch: expected a multiple of 2")
    assert width.startswith("--mesh.fsdp: expected a divisor of 36, the dimension 'embed'")


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_run_goes_on_on_other_meshes(result, optimizer):
    """From eight devices to one, and back to eight on a different mesh."""
    np.testing.assert_allclose(result(f"moved by {optimizer}"), result(f"straight by {optimizer}"), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("networks", ["decoders", "encoders"])
def test_every_mechanism_can_be_compiled_for_a_mesh_of_tpus(result, networks):
    assert result(networks) == {}
