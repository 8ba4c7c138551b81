"""Functions of whole rows, shared by four of eight devices: the same numbers as one, and no device has all heads'
rows."""

import functools

import jax
import jax.numpy as jnp
import pytest

from brl_jax import informer_attention, reformer_attention, reformer_rotations, sliceformer_attention
from tests.marks import slow_unless
from tests.support.meshes import check_equal, compared, draw, moved

pytestmark = pytest.mark.xdist_group("devices")


def reformer(query, value, **options):
    rotations = reformer_rotations(jax.random.key(0), query.shape[3], num_rounds=2, num_buckets=4)
    return reformer_attention(query, value, rotations, chunk_size=8, **options)


def informer(query, key, value, **options):
    return informer_attention(query, key, value, rng=jax.random.key(1), factor=2, **options)


# The function, and the number of heads of each of its arrays.
CASES = {
    "reformer": (functools.partial(reformer, is_causal=True), (4, 4)),
    "reformer, fewer heads than devices": (functools.partial(reformer, is_causal=True), (4, 2)),
    "reformer, one head, padded": (
        functools.partial(reformer, key_value_seq_lengths=jnp.array([13, 64])),
        (1, 1),
    ),
    "informer": (functools.partial(informer, is_causal=True), (4, 4, 4)),
    "informer, fewer heads than devices": (informer, (6, 2, 2)),
    "sliceformer": (sliceformer_attention, (4,)),
}


def arrays(name):
    function, heads = CASES[name]
    return function, *(draw(2, 64, n, 8, seed=seed) for seed, n in enumerate(heads))


PARTS = {name: lambda name=name: compared(*arrays(name)) for name in CASES}
PARTS |= {
    f"moved {name}": lambda name=name: moved(*arrays(name), length=64) for name in ("reformer", "informer")
}


@pytest.mark.parametrize("name", slow_unless(CASES, ("reformer, fewer heads than devices",)))
def test_results_and_gradients_equal_one_devices(result, name):
    check_equal(*result(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["reformer", "informer"])
def test_parts_of_rows_are_exchanged_and_no_row_is_gathered(result, name):
    """A device has 1,024 tokens of 4 heads of 8 features, which is the size of one head of the whole row."""
    found = result(f"moved {name}")
    assert {kind for kind, _ in found} == {"all-to-all"}
    assert max(elements for _, elements in found) <= 1024 * 4 * 8
