"""In-context regression: the prompts, the commands as a user runs them, and a comparison with least squares."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eval.tasks.regression
import train.regression
from eval.tasks.regression import draw, markdown
from tests.support.command_lines import config_of, last_wins
from tests.support.logs import metrics_lines
from train.data.drawn import DrawnBatches
from train.data.in_context import (
    HeldOutPrompts,
    InContextConfig,
    draw_prompts,
    least_squares_errors,
    one_step_errors,
)
from train.engine.errors import UserError
from train.tasks.regression import REGRESSION, make_prompt, regression_objective, squared_errors

TINY = (
    "--input_dim 3 --pairs 5 --valid_prompts 10 --test_prompts 12 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 "
    "--mup_base_width 16 --batch 8 --warmup_steps 2 --learning_rate 0.01 --tensorboard False"
)


def run(workdir, more="", preset="full-1"):
    train.regression.main(
        last_wins(f"{preset} --workdir {workdir} {TINY} --steps 6 --eval_every 3 --checkpoint_every 2 {more}")
    )


def test_prompts_are_linear_functions():
    config = InContextConfig(input_dim=4, pairs=6)
    batch = draw_prompts(config, (0, 1), np.arange(3), 4, 6)
    x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
    weights = np.stack([np.linalg.lstsq(a, b, rcond=None)[0] for a, b in zip(x, y)])
    np.testing.assert_allclose((x @ weights[..., None])[..., 0], y, atol=1e-5)
    assert np.abs(weights[0] - weights[1]).max() > 0.1
    # A row depends neither on the others in its call nor on the batch, and occurs in only one batch.
    np.testing.assert_array_equal(draw_prompts(config, (0, 1), np.array([2]), 4, 6)["x"][0], batch["x"][2])
    assert np.abs(draw_prompts(config, (0, 2), np.arange(3), 4, 6)["x"] - batch["x"]).min() > 0
    many = draw_prompts(config, (0, 3), np.arange(4000), 4, 6)
    assert np.square(many["y"]).mean() == pytest.approx(1.0, abs=0.05)


def test_curriculum_grows():
    config = InContextConfig(input_dim=8, pairs=11, start_dims=2, start_pairs=5, curriculum_steps=6)
    assert [config.sizes(step) for step in (0, 1, 3, 6, 99)] == [(2, 5), (3, 6), (5, 8), (8, 11), (8, 11)]
    batches = [batch for batch, _ in zip(DrawnBatches(config, batch=2, seed=1), range(4))]
    for batch, (dims, pairs) in zip(batches, [(2, 5), (3, 6), (4, 7), (5, 8)]):
        assert np.all(batch["x"][..., :dims] != 0)
        assert np.all(batch["x"][..., dims:] == 0)
        np.testing.assert_array_equal(batch["weights"], np.tile(np.arange(11) < pairs, (2, 1)))


def test_one_step_of_gradient_descent():
    """The formula's rate is the best of those tried, and it predicts the error on drawn prompts."""
    config = InContextConfig(input_dim=4, pairs=10)
    batch = draw_prompts(config, (0, 1), np.arange(40_000), 4, 10)
    x, y = batch["x"].astype(np.float64), batch["y"].astype(np.float64)
    expected = one_step_errors(4, 10)
    for i in (1, 3, 9):
        guess = np.einsum("rid,ri,rd->r", x[:, :i], y[:, :i], x[:, i]) / i
        best = min(np.square(y[:, i] - rate * guess).mean() for rate in np.linspace(0, 1, 101))
        np.testing.assert_allclose(best, expected[i], rtol=0.03)
    assert expected[0] == 1


def test_least_squares():
    config = InContextConfig(input_dim=4, pairs=7)
    batch = draw_prompts(config, (5,), np.arange(3000), 4, 7)
    errors = least_squares_errors(batch["x"], batch["y"])
    # The least-norm solution is the posterior mean: after i pairs, 1 - i / d of the variance is left.
    np.testing.assert_allclose(errors.mean(axis=0), [1, 0.75, 0.5, 0.25, 0, 0, 0], atol=0.06)
    x, y = batch["x"][7].astype(np.float64), batch["y"][7].astype(np.float64)
    for i in range(1, 7):
        weights = np.linalg.lstsq(x[:i], y[:i], rcond=None)[0]
        assert errors[7, i] == pytest.approx((x[i] @ weights - y[i]) ** 2, abs=1e-9)


def test_prompt_layout():
    x, y = jnp.arange(6.0).reshape(1, 3, 2), jnp.array([[7.0, 8.0, 9.0]])
    alternate = make_prompt(x, y, "alternate")[0]
    joined = make_prompt(x, y, "joined")[0]
    np.testing.assert_array_equal(alternate[2:4], [[2, 3, 0], [0, 0, 8]])
    np.testing.assert_array_equal(joined[2:4], [[2, 3, 0], [2, 3, 8]])


@pytest.mark.parametrize("kind", ["alternate", "joined"])
def test_a_prediction_sees_earlier_pairs_only(kind):
    config = config_of(REGRESSION, TINY, "full-1")
    config = dataclasses.replace(
        config, model=dataclasses.replace(config.model, num_inputs=4, max_length=10, num_layers=2)
    )
    model = REGRESSION.build(config)
    rng = np.random.default_rng(3)
    params = jax.tree.map(
        lambda box: jnp.asarray(0.5 * rng.standard_normal(box.unbox().shape), jnp.float32),
        jax.eval_shape(regression_objective(model, kind).init, jax.random.key(0)),
        is_leaf=lambda leaf: hasattr(leaf, "unbox"),
    )
    batch = draw_prompts(config.data, (0,), np.arange(2), 3, 5)
    changed = batch["y"].copy()
    changed[:, 2] += 1.0

    @jax.jit
    def predictions(y):
        return jnp.sqrt(squared_errors(model, kind, params, {"x": batch["x"], "y": y}, None))

    # |prediction - y|, so compare where the targets are the same.
    before, after = np.asarray(predictions(batch["y"])), np.asarray(predictions(changed))
    np.testing.assert_array_equal(before[:, :2], after[:, :2])
    assert np.abs(before[:, 3:] - after[:, 3:]).min() > 0
    # If the prediction ignores the target, (prediction - y - n)^2 has the second difference 2 in n.
    twice = batch["y"].copy()
    twice[:, 2] += 2.0
    squares = [np.square(np.asarray(predictions(y), np.float64)[:, 2]) for y in (batch["y"], changed, twice)]
    np.testing.assert_allclose(squares[0] - 2 * squares[1] + squares[2], 2, rtol=1e-3)


def test_held_out_prompts_are_the_same_in_any_batches_and_in_no_training_batch():
    """Nor do the two splits share any."""
    config = InContextConfig(input_dim=2, pairs=3, valid_prompts=12, test_prompts=12)
    drawn = [batch["y"] for _, batch in zip(range(12), DrawnBatches(config, batch=12, seed=0))]
    for split in ("valid", "test"):
        found, again = (
            np.concatenate([batch["y"][batch["weights"][:, 0] > 0] for batch in held_out])
            for held_out in (HeldOutPrompts(config, batch=rows, split=split) for rows in (12, 5))
        )
        np.testing.assert_array_equal(again, found)
        drawn.append(found)
    prompts = np.concatenate(drawn)
    assert len(np.unique(prompts, axis=0)) == len(prompts) == 12 * 14


def test_it_begins_at_zero_and_learns(runs):
    read = metrics_lines(runs / "run")
    assert [line["step"] for line in read] == list(range(1, 7))
    assert [line["step"] for line in read if "val_loss" in line] == [3, 6]
    first = draw_prompts(InContextConfig(input_dim=3, pairs=5), (0, 0, 0), np.arange(8), 3, 5)
    assert read[0]["loss"] == pytest.approx(float(np.square(first["y"]).mean()), rel=1e-5)


@pytest.mark.slow
def test_measuring_and_the_table(runs, capsys):
    eval.tasks.regression.main(["--workdir", str(runs / "run"), "--checkpoint", "6"])
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["prompts"] == 12
    assert result["error"] == pytest.approx(np.mean(result["errors"]))
    tests = HeldOutPrompts(InContextConfig(input_dim=3, pairs=5, test_prompts=12), batch=12, split="test")
    batch = next(iter(tests))
    expected = least_squares_errors(batch["x"], batch["y"]).mean(axis=0)
    np.testing.assert_allclose(result["least_squares"], expected, rtol=1e-6)
    # Dense products of a step: per token 2 (4 d d + 2 d 16) forward and twice that backward, plus the scores.
    dense = 3 * 2 * (4 * 16 * 16 + 2 * 16 * 16) * 8 * 10
    assert dense < result["flops_per_step"] < 1.6 * dense
    assert result["curve"]["step"] == [3, 6]
    picture = runs / "table.png"
    eval.tasks.regression.main(["--table", str(runs), "--picture", str(picture)])
    text = capsys.readouterr().out
    assert "| full, 1 head | 16 | 16 |" not in text  # this run has two heads
    assert "| full, 2 heads | 16 | 8 | 8 |" in text
    assert "| least squares, 3 inputs, 5 pairs |" in text
    assert "| one step of gradient descent, 3 inputs, 5 pairs |" in text
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert (runs / "run" / "regression_test.json").exists()


def test_metrics_without_an_evaluation_are_named(runs, tmp_path):
    """Crashes cut metrics off, and the table has the seconds up to the last evaluation."""
    shutil.copytree(runs / "run", tmp_path / "full")
    metrics = tmp_path / "full" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().splitlines()[0] + "\n")
    with pytest.raises(UserError, match=f"--workdir: {metrics} has no evaluation"):
        eval.tasks.regression.main(["--workdir", str(tmp_path / "full")])
    metrics.unlink()
    with pytest.raises(UserError, match=f"--workdir: {metrics} is missing"):
        eval.tasks.regression.main(["--workdir", str(tmp_path / "full")])


def test_the_table_names_what_runs_differ_in():
    """If runs share mechanism and width, the table and picture name what differs. Each width has a separate column."""

    def result(rate, width, seed):
        return {
            "model": "full", "num_heads": 2, "d_model": width, "batch": 8, "input_dim": 3, "seed": seed,
            "parameters": 7, "flops_per_step": 1e12, "curve": {"step": [6], "seconds": [1.0], "error": [1.0]},
            "error": 1.0, "errors": [1.0] * 5, "least_squares": [0.5] * 5, "least_squares_error": 0.5,
            "configuration": {"optimizer.learning_rate": rate, "model.d_model": width},
        }  # fmt: skip

    results = [result(*each) for each in ((0.1, 16, 0), (0.1, 16, 1), (0.2, 16, 0), (0.1, 32, 0))]
    rows = markdown(results).splitlines()[2:5]
    assert [row.split(" | ")[:3] for row in rows] == [
        ["| full, 2 heads, learning_rate 0.1", "16", "8"],
        ["| full, 2 heads, learning_rate 0.2", "16", "8"],
        ["| full, 2 heads", "32", "16"],
    ]
    texts = {text.get_text() for axes in draw(results).axes for text in axes.texts}
    assert {f"full, 2 heads, learning_rate {rate}, width 16" for rate in (0.1, 0.2)} < texts
