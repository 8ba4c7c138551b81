"""eval.jacobian: sensitivities against the full Jacobian, their averages by distance, and the command."""

import dataclasses
import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import BRLConfig, FullConfig, LocalConfig
from brl_jax.models import DecoderConfig, DecoderLM
from eval.studies.jacobian import by_distance, main, sensitivities, stack_io
from eval.tasks.context import window_reach
from train.data.recall import RecallDataConfig, draw_rows
from train.recall import main as train
from train.tasks.recall import recall_objective

DATA = RecallDataConfig(vocabulary=16, length=(20,), pairs=(2,))
LOCAL = LocalConfig(window=3)
BRL = BRLConfig(window=3, num_compressed=2, block_size=4, history_size=8)


def _network(mechanism, **options):
    config = DecoderConfig(
        num_layers=2, d_model=8, num_heads=2, d_ff=8, vocab_size=16, mechanism=mechanism, **options
    )
    objective = recall_objective(DecoderLM(config))
    batch = draw_rows(DATA, DATA.cases[0], (0,), 2)
    return objective, nn.unbox(objective.init(jax.random.key(0))), batch


def test_a_layer_of_two_windows_reaches_as_far_as_the_wider_one():
    config = DecoderConfig(
        num_layers=2,
        mechanism=LocalConfig(window=3),
        late_mechanism=LocalConfig(window=6),
        schedule="parallel",
    )
    assert window_reach(config.mechanisms, 20) == 2 * 5
    with_full = dataclasses.replace(config, late_mechanism=FullConfig())
    assert window_reach(with_full.mechanisms, 20) == 19


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [LOCAL, BRL])
def test_sensitivities_are_the_norms_of_the_jacobian(mechanism):
    objective, params, batch = _network(mechanism)
    places = np.array([[3, 19], [11, 12]])
    got = jax.jit(lambda p: sensitivities(objective, p, batch, places, 200, jax.random.key(1)))(params)
    x, _ = stack_io(objective, params, batch, None)
    # Not jit(jacrev(.)): jaxlib 0.10.2 on a CPU gets even x * sum(x * x) wrong that way, in plain JAX.
    whole = jax.jit(jax.jacfwd(lambda moved: stack_io(objective, params, batch, moved)[1]))(jnp.zeros_like(x))
    for row in range(2):
        block = np.asarray(whole, np.float64)[row, places[row], :, row]
        expected = np.square(block).sum((1, 3)) / x.shape[-1]
        # With 200 directions of 8 numbers, the mean of the squares is accurate to about 10 percent.
        np.testing.assert_allclose(got[row], expected, rtol=0.5, atol=1e-9)
        np.testing.assert_allclose(np.sum(got[row], -1), expected.sum(-1), rtol=0.25)
    # Proposition 2.2: two layers of window 3 reach 4 tokens back and no farther; compressed tokens do.
    assert window_reach((mechanism, mechanism), 20) == 4
    assert (np.asarray(got)[0, 1, :15] == 0).all() == (mechanism is LOCAL)
    assert (np.asarray(got)[0, 1, 15:] > 0).all()
    assert (np.asarray(got)[0, 0, 4:] == 0).all()


def test_averages_by_distance():
    squares = np.zeros((1, 2, 6))
    squares[0, 0, :3] = 1.0, 4.0, 9.0  # position 2
    squares[0, 1, :5] = 16.0, 0.0, 0.0, 0.0, 25.0  # position 4
    ranges, farthest = by_distance(squares, np.array([[2, 4]]), np.array([5]))
    # Nothing reaches later tokens, so neither they nor the padding at the end are averaged.
    assert [(r["first"], r["end"]) for r in ranges] == [(0, 1), (1, 2), (2, 4), (4, 8)]
    np.testing.assert_allclose(
        [r["sensitivity"] for r in ranges], [17**0.5, 2**0.5, (1 / 3) ** 0.5, 4.0], rtol=1e-6
    )
    assert farthest == 4
    squares[0, 0, 4] = 100.0  # an encoder sees later tokens too
    ranges, _ = by_distance(squares, np.array([[2, 4]]), np.array([5]))
    np.testing.assert_allclose(ranges[2]["sensitivity"] ** 2, (1.0 + 100.0 + 0.0 + 0.0) / 4, rtol=1e-6)


@pytest.mark.slow
def test_command(tmp_path, capsys):
    small = "--steps 2 --batch 4 --eval_every 2 --checkpoint_every 2 --valid_rows 4"
    train(["local", "--workdir", str(tmp_path / "local"), *small.split()])
    capsys.readouterr()
    picture = tmp_path / "jacobian.png"
    main(["--workdir", str(tmp_path / "local"), "--sequences", "2", "--picture", str(picture)])
    (line,) = capsys.readouterr().out.splitlines()
    result = json.loads(line)
    assert result["reach"] == result["farthest"] == 14
    assert picture.stat().st_size > 10_000
