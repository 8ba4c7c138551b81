"""Batches of the language model whose rows hold several documents."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import BRLConfig, DecoderConfig, DecoderLM
from tests.support.parameters import drawn
from train.tasks.lm import lm_objective


@pytest.mark.slow  # compiles four shapes; law 4 is fast
def test_a_packed_row_trains_as_its_documents_do():
    """The loss of two documents in a row is the sum of their separate losses, whatever memory the row carries."""
    model = DecoderLM(
        DecoderConfig(
            vocab_size=11,
            num_layers=1,
            d_model=8,
            num_heads=2,
            d_ff=8,
            mechanism=BRLConfig(window=2, num_compressed=2, history_size=4),
        )
    )
    objective = lm_objective(model)
    params = drawn(objective.init)
    tokens = np.random.default_rng(0).integers(0, 11, (1, 13)).astype(np.int32)
    weights = np.ones((1, 12), np.float32)
    weights[0, 4] = 0.0  # the first document's last token must not predict the second document
    batch = {"tokens": tokens[:, :-1], "targets": tokens[:, 1:], "weights": weights}
    segments = jnp.asarray(np.arange(12)[None] >= 5, jnp.int32)
    memory = jax.tree.map(lambda a: a + jnp.ones((), a.dtype), objective.init_memory(1))
    loss = jax.jit(lambda batch, memory: objective.loss(params, memory, batch, None)[0])
    together = loss(batch | {"segment_ids": segments}, memory)
    alone = sum(
        loss({name: a[:, places] for name, a in batch.items()}, objective.init_memory(1))
        for places in (slice(0, 5), slice(5, 12))
    )
    np.testing.assert_allclose(together, alone, rtol=1e-6)
    assert abs(float(loss(batch, objective.init_memory(1))) - float(alone)) > 1e-3
