"""Absent tokens match no other token, whatever ids the caller uses."""

import numpy as np
import pytest

from pallas_kernels.absent import mark_absent

ENDS = np.iinfo(np.int32)


@pytest.mark.parametrize(
    "ids", [[7], [-1], [-2, -1], [0, 1, 2], [ENDS.min, ENDS.max], [ENDS.min, ENDS.min + 1, 0, ENDS.max]]
)
def test_absent_tokens_match_nothing(ids):
    rng = np.random.default_rng(0)
    query_ids, key_ids = (rng.choice(ids, (3, size)).astype(np.int32) for size in (5, 9))
    query_exists, key_exists = (rng.random((3, size)) < 0.6 for size in (5, 9))
    new = [np.asarray(x) for x in mark_absent(query_ids, key_ids, query_exists, key_exists)]
    expected = query_ids[:, :, None] == key_ids[:, None, :]
    expected &= query_exists[:, :, None] & key_exists[:, None, :]
    np.testing.assert_array_equal(new[0][:, :, None] == new[1][:, None, :], expected)


def test_without_ids_all_existing_tokens_share_a_segment():
    query_exists, key_exists = np.array([[True, False]]), np.array([[True, True, False], [False, True, True]])
    query_ids, key_ids = (np.asarray(x) for x in mark_absent(None, None, query_exists, key_exists))
    seen = query_ids[:, :, None] == key_ids[:, None, :]
    np.testing.assert_array_equal(seen, query_exists[:, :, None] & key_exists[:, None, :])
