"""The bounds of TPU kernels, against counts by hand and the makers' data sheets."""

import numpy as np
import pytest

from eval.chips.tpu_bounds import matrix_cycles, memory_cycles, tiled_products, visible_products
from eval.chips.tpu_chips import SMALLEST_TOPOLOGIES


@pytest.mark.parametrize("window", [1, 7, 40, 100])
def test_products_of_visible_pairs(window):
    queries, keys = np.indices((40, 40))
    pairs = int(((keys <= queries) & (keys > queries - window)).sum())
    assert visible_products(40, window, 3, 16, backward=False) == 2 * pairs * 3 * 16
    assert visible_products(40, window, 3, 16, backward=True) == 7 * pairs * 3 * 16


@pytest.mark.parametrize(
    ("chip", "head_dim", "backward", "units"),
    [
        # For 128 queries and 384 keys: 3 pairs of tiles, each two products of 128 x 128 x 128.
        ("v5e", 128, False, 3 * 2),
        ("v5e", 128, True, 3 * 7),
        # Scores have 64 lanes in a depth of 128; the other products have 64 rows.
        ("v5e", 64, False, 3 * 1.5),
        ("v5e", 64, True, 3 * (1.5 + 2 + 1.5)),
        # For 256 queries and 512 keys, 2 pairs of tiles; scores fill half of a depth of 256, the output has 128 rows.
        ("v6e", 128, False, 2 * 8 * 1.5 / 2),
        ("v6e", 128, True, 2 * 8 * (1.5 + 4.5) / 2),
    ],
)
def test_products_in_tiles(chip, head_dim, backward, units):
    length, heads = 1 << 14, 4
    want = units * 128**3 * heads * length / 128
    assert tiled_products(chip, length, 256, heads, head_dim, False, backward=backward) == want


def test_cycles():
    assert matrix_cycles("v5e", 65536 * 5 + 1) == 6
    assert matrix_cycles("v6e", 262144 * 5) == 5
    # 0.82 TB/s at 1.5 GHz is 546 bytes a cycle.
    assert memory_cycles("v5e", 546e6) == pytest.approx(1e6, rel=5e-3)
    assert all(memory_cycles(chip, 1e9) > 0 for chip in SMALLEST_TOPOLOGIES)
