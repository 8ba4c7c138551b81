"""The loss of large vocabularies against a computation by hand in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.models import losses
from brl_jax.models.losses import cross_entropy

BATCH, LENGTH, WIDTH, VOCABULARY, Z = 2, 7, 4, 11, 0.3


def by_hand(hidden, table, targets, weights):
    """The loss and its gradients by `hidden` and `table`: d/dx of w (log Z - x_t + z log(Z)^2)."""
    hidden, table = hidden.astype(np.float64), table.astype(np.float64)
    total, slopes = 0.0, np.zeros((BATCH, LENGTH, VOCABULARY))
    logits = hidden @ table.T
    for b in range(BATCH):
        for t in range(LENGTH):
            log_z = np.log(np.exp(logits[b, t]).sum())
            total += weights[b, t] * (log_z - logits[b, t, targets[b, t]] + Z * log_z**2)
            slopes[b, t] = weights[b, t] * np.exp(logits[b, t] - log_z) * (1 + 2 * Z * log_z)
            slopes[b, t, targets[b, t]] -= weights[b, t]
    return total, slopes @ table, np.einsum("btv,btd->vd", slopes, hidden)


@pytest.mark.slow
@pytest.mark.parametrize("pieces", [1, 4])
def test_z_loss_and_weights(monkeypatch, pieces):
    monkeypatch.setattr(losses, "_LOGITS", BATCH * VOCABULARY * (LENGTH if pieces == 1 else 2))
    rng = np.random.default_rng(0)
    hidden = rng.standard_normal((BATCH, LENGTH, WIDTH)).astype(np.float32)
    table = rng.standard_normal((VOCABULARY, WIDTH)).astype(np.float32)
    targets = rng.integers(VOCABULARY, size=(BATCH, LENGTH)).astype(np.int32)
    weights = rng.choice([0.0, 0.25, 1.0, 3.0], size=(BATCH, LENGTH)).astype(np.float32)

    def loss(hidden, table, z_loss):
        to_logits = lambda x: jnp.einsum("btd,vd->btv", x, table)  # noqa: E731
        return cross_entropy(hidden, to_logits, targets, weights, vocab_size=VOCABULARY, z_loss=z_loss)

    (total, weight), slopes = jax.value_and_grad(loss, (0, 1), has_aux=True)(hidden, table, Z)
    expected, *expected_slopes = by_hand(hidden, table, targets, weights)
    assert weight == weights.sum()
    np.testing.assert_allclose(total, expected, rtol=1e-5)
    for slope, correct in zip(slopes, expected_slopes, strict=True):
        np.testing.assert_allclose(slope, correct, rtol=1e-4, atol=1e-5)
    assert abs(loss(hidden, table, 0.0)[0] - total) > 1
