"""Checks that a classifier's logits don't depend on how far its rows are padded."""

import jax
import numpy as np

from tests.support.parameters import drawn


def check_read_alike(classifier, widths):
    """Asserts that one short sequence gets the same logits in rows of each of three widths."""
    lengths, logits, apply = np.array([7]), [], jax.jit(classifier.apply)
    params = drawn(classifier.init, np.zeros((1, 1), np.int32))
    for width in widths:
        tokens = np.zeros((1, width), np.int32)
        tokens[:, :7] = np.arange(7) * 20
        logits.append(apply(params, tokens, lengths=lengths))
    np.testing.assert_allclose(logits[1], logits[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(logits[2], logits[0], rtol=1e-4, atol=1e-5)
