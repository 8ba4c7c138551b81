"""Which blocks the window kernel reads, against a dense mask; no GPU is needed."""

import numpy as np
import pytest

from pallas_kernels.triton.local.lists import Pattern, _touched, make_lists


def window(query, key, num_positions):
    return (query - key <= 3) & (key - query <= 1)


PATTERNS = {
    "window": Pattern(((0, 7, 0, 12),), window, False, 7, 12, query_position=2),
    "causal": Pattern(((-4, 99, -4, 99),), None, True, 7, 12, query_position=2),
    "earlier queries": Pattern(((0, 9, 0, 8),), window, True, 9, 8, key_position=3),
    "two rectangles": Pattern(((0, 4, 0, 5), (4, 9, 5, 9)), lambda q, k, n: (q < 4) == (k < 5), False, 9, 9),
    "nothing": Pattern((), None, False, 3, 3),
}


@pytest.mark.parametrize("by_keys", [False, True])
@pytest.mark.parametrize("name", PATTERNS)
def test_the_listed_blocks_are_the_dense_mask(name, by_keys):
    pattern, block_q, block_k = PATTERNS[name], 4, 3
    query = pattern.query_position + np.arange(pattern.num_queries)[:, None]
    key = pattern.key_position + np.arange(pattern.num_keys)
    seen = np.full((len(query), len(key)), bool(pattern.rectangles))
    if pattern.visible is not None:
        seen &= pattern.visible(query, key, pattern.num_positions)
    if pattern.is_causal:
        seen &= key <= query
    lists = make_lists(pattern, block_q, block_k, by_keys)
    found = np.zeros((-(-len(query) // block_q) * block_q, -(-len(key) // block_k) * block_k), int)
    for line, middle in enumerate(lists.middles):
        for pair in range(lists.starts[line], lists.starts[line + 1]):
            row, column = (lists.others[pair], line) if by_keys else (line, lists.others[pair])
            mask = np.ones((block_q, block_k), int)
            if pair < middle:
                mask = lists.masks[lists.mask_numbers[pair]]
            if pair < middle and lists.consecutive:
                first, stop = mask[:, :, None]
                mask = ((np.arange(block_k) >= first) & (np.arange(block_k) < stop)).astype(int)
            assert mask.any()
            assert (pair >= middle) == mask.all()
            found[row * block_q :, column * block_k :][:block_q, :block_k] += mask
    np.testing.assert_array_equal(found[: len(query), : len(key)], seen)


def test_causal_queries_touch_no_block_of_later_keys():
    """Queries 0 to 3 are at positions 2 to 5; queries 4 to 6, the last, are at 6 to 8."""
    assert [row.tolist() for row in _touched(PATTERNS["causal"], 2, 4, 3)] == [[0, 1], [0, 1, 2]]
