"""The transpose of the lists of chosen blocks; the gradient of keys and values walks it."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.triton.selected import api


@pytest.mark.parametrize("tile", [4, 16])
def test_each_pair_is_in_a_part_of_every_tile_that_it_touches(tile, monkeypatch):
    """41 keys in blocks of 6 that may start at any key; many blocks are repeated."""
    monkeypatch.setattr(api, "_PAIRS_OF_PART", 8)
    rng = np.random.default_rng(0)
    starts = rng.choice([0, 0, 0, 3, 6, 13, 35, 40, 41], (2, 20, 2, 3)).astype(np.int32)
    lists = api.transposed_lists(jnp.asarray(starts), 41, 6, tile)
    pairs, pair_starts, tiles, begins, ends, firsts = map(np.asarray, lists)
    flat = np.moveaxis(starts, 2, 1).reshape(2, 2, -1)
    np.testing.assert_array_equal(np.take_along_axis(flat, pairs, 2), pair_starts)
    assert (ends - begins <= 8).all()
    for row in np.ndindex(2, 2):
        for j in range(-(-41 // tile)):
            parts = range(firsts[row][j], firsts[row][j + 1])
            assert all(tiles[row][part] == j for part in parts)
            found = [pairs[row][i] for part in parts for i in range(begins[row][part], ends[row][part])]
            touching = (flat[row] < min((j + 1) * tile, 41)) & (flat[row] + 6 > j * tile)
            assert sorted(found) == np.flatnonzero(touching).tolist()
        assert (ends[row][firsts[row][-1] :] == 0).all()
