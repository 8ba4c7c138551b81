import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import FullConfig
from brl_jax.models import DecoderConfig, DecoderLM
from brl_jax.sharding import MeshConfig, make_mesh
from tests.train.toy import OBJECTIVE, OPTIMIZER, batch_of
from train.engine.batch import Batch
from train.engine.config import LoopConfig
from train.engine.mesh import training_programs
from train.engine.optimizer import decayed, make_optimizer, make_schedule
from train.engine.step import Objective, classification, init_state, make_train_step, random_streams
from train.tasks.lm import lm_objective


def _start(accumulation, objective=OBJECTIVE, rows=4):
    schedule = make_schedule(OPTIMIZER, 10)
    boxed = objective.init(jax.random.key(0))
    optimizer = make_optimizer(OPTIMIZER, schedule, decayed(boxed))
    state = init_state(
        objective,
        nn.unbox(boxed),
        optimizer,
        key=jax.random.key(1),
        rows=rows // accumulation,
        accumulation=accumulation,
    )
    return jax.jit(make_train_step(objective, optimizer, schedule, accumulation)), state


def _without_dropout():
    return Objective(
        OBJECTIVE.init,
        lambda params, memory, batch, key: OBJECTIVE.loss(params, memory, batch, None),
        OBJECTIVE.init_memory,
    )


def test_one_step_of_low_rank_changes_by_hand():
    """y = (W + 3/2 A B) x with squared errors: AdamW's first step in float64; W stays as it is."""
    rng = np.random.default_rng(0)
    weights = {"kernel": (3, 5), "lora_down": (3, 2), "lora_up": (2, 5)}
    weights = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in weights.items()}
    x, y = (rng.standard_normal((4, n)).astype(np.float32) for n in (3, 5))

    def loss(params, memory, batch, key):
        w = params["layer"]
        off = batch["x"] @ (w["kernel"] + 1.5 * w["lora_down"] @ w["lora_up"]) - batch["y"]
        return (off**2).sum(), np.float32(len(off)), memory

    init = lambda key: {"layer": jax.tree.map(jnp.asarray, weights)}  # noqa: E731
    objective = Objective(init, loss, trained=lambda path: path[-1] in ("lora_down", "lora_up"))
    config = dataclasses.replace(OPTIMIZER, clip_norm=0.0, weight_decay=0.5, warmup_steps=0)
    schedule = make_schedule(config, 10)
    params = init(None)
    trained, frozen = objective.split(params)
    assert frozen == {"layer": {"kernel": params["layer"]["kernel"]}}
    optimizer = make_optimizer(config, schedule, decayed(trained))
    state = init_state(objective, params, optimizer, key=jax.random.key(1), rows=2, accumulation=2)
    step = jax.jit(make_train_step(objective, optimizer, schedule, 2))
    new, metrics = step(state, Batch({"x": x, "y": y}, reset=np.bool_(True)))
    w, a, b, x, y = (np.float64(each) for each in (*weights.values(), x, y))
    pulled = x.T @ (2 * (x @ (w + 1.5 * a @ b) - y)) / 4
    gradients = {"lora_down": 1.5 * pulled @ b.T, "lora_up": 1.5 * a.T @ pulled}
    norm = np.sqrt(sum((g**2).sum() for g in gradients.values()))
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
    for name, g in gradients.items():
        old, rate = weights[name], config.learning_rate
        want = old - rate * (g / (np.abs(g) + config.epsilon) + 0.5 * old)
        np.testing.assert_allclose(new.params["layer"][name], want, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(new.params["layer"]["kernel"], weights["kernel"])


@pytest.mark.slow
def test_low_rank_changes_take_a_third_of_the_memory():
    """By the compiler's analysis of a step: no moments and no gradients of the weights, and no merged copies."""
    sizes = {"num_layers": 6, "d_model": 256, "num_heads": 4, "vocab_size": 1024, "remat": "full"}
    tokens = jax.ShapeDtypeStruct((2, 32), jnp.int32)
    batch = Batch({"tokens": tokens, "targets": tokens}, reset=jax.ShapeDtypeStruct((), jnp.bool_))
    total, temporary = {}, {}
    for rank in (0, 4):
        config = DecoderConfig(**sizes, mechanism=FullConfig(), implementation="xla", lora_rank=rank)
        mesh = make_mesh(MeshConfig(), jax.devices()[:1])
        with jax.set_mesh(mesh):
            programs = training_programs(
                mesh, lm_objective(DecoderLM(config)), OPTIMIZER, LoopConfig(batch=2)
            )
            memory = programs.step.lower(jax.eval_shape(programs.fresh), batch).compile().memory_analysis()
        temporary[rank] = memory.temp_size_in_bytes
        total[rank] = memory.argument_size_in_bytes + memory.temp_size_in_bytes
    assert total[4] < total[0] / 3
    weights = 4 * 6 * (4 * 256**2 + 3 * 256 * 1024)
    assert temporary[4] < weights / 2 < weights < temporary[0]


def _batch(seed, reset=False, rows=4):
    return Batch(batch_of(seed, rows), reset=np.bool_(reset))


def test_classification_counts_the_likeliest_class():
    """The prediction is the class with the largest logit, for any number of classes and for tokens in rows as well."""
    logits = np.array(
        [[[0.1, 3.0, -2.0], [5.0, 4.0, 4.9]], [[-3.0, -2.0, -1.0], [1.0, 2.0, -9.0]]], np.float32
    )
    targets = np.array([[1, 1], [2, 2]], np.int32)
    loss, right = classification(logits, targets)
    np.testing.assert_array_equal(right, [[1, 0], [1, 0]])
    chances = np.exp(logits.astype(np.float64))
    chances = np.take_along_axis(chances / chances.sum(-1, keepdims=True), targets[..., None], -1)[..., 0]
    np.testing.assert_allclose(loss, -np.log(chances), rtol=1e-5)


def test_z_loss_is_added_in_training_alone():
    """By hand in float64; logits that are all larger by 3 have the same loss otherwise."""
    logits, targets = 3 + np.random.default_rng(0).standard_normal((2, 5, 7)), np.arange(10).reshape(2, 5) % 7
    logits = logits.astype(np.float32)
    log_z = np.log(np.exp(logits.astype(np.float64)).sum(axis=-1))
    plain = log_z - np.take_along_axis(logits.astype(np.float64), targets[..., None], -1)[..., 0]
    loss, right = classification(logits, targets, jax.random.key(0), 0.1)
    np.testing.assert_allclose(loss, plain + 0.1 * log_z**2, rtol=1e-5)
    np.testing.assert_allclose(classification(logits, targets, None, 0.1)[0], plain, rtol=1e-5)
    np.testing.assert_array_equal(right, classification(logits, targets)[1])


@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_equals_one_large_batch(accumulation):
    plain, one = _start(1, _without_dropout())
    cut, many = _start(accumulation, _without_dropout())
    for seed in range(3):
        one, expected = plain(one, _batch(seed))
        many, got = cut(many, _batch(seed))
        for name in expected:
            np.testing.assert_allclose(got[name], expected[name], rtol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), many.params, one.params)


@pytest.mark.parametrize("accumulation", [1, 2, 4])
def test_each_row_keeps_its_own_past(accumulation):
    step, state = _start(accumulation)
    for seed in range(2):
        state, _ = step(state, _batch(seed))
        assert state.memory.shape == (accumulation, 4 // accumulation)
        np.testing.assert_array_equal(state.memory.reshape(-1), _batch(seed)["tokens"][:, -1])


def test_reset_clears_the_memory():
    objective = _without_dropout()
    step, state = _start(2, objective)
    used, _ = step(state, _batch(0))
    _, kept = step(used, _batch(1))
    _, cleared = step(used, _batch(1, reset=True))
    _, empty = step(used.replace(memory=state.memory), _batch(1))
    assert float(cleared["loss"]) == float(empty["loss"])
    assert float(cleared["loss"]) != float(kept["loss"])


def test_a_step_without_weighted_targets_changes_nothing_to_nan():
    objective = _without_dropout()
    loss = objective.loss

    def unweighted(params, memory, batch, key):
        total, weight, memory, *averages = loss(params, memory, batch, key)
        return 0.0 * total, 0.0 * weight, memory, *(jax.tree.map(lambda x: 0.0 * x, x) for x in averages)

    step, state = _start(2, dataclasses.replace(objective, loss=unweighted))
    state, metrics = step(state, _batch(0))
    assert float(metrics["loss"]) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((state.params, state.opt_state)))


def test_dropout_depends_on_step_key_and_microbatch():
    step, state = _start(2)
    _, first = step(state, _batch(0))
    _, again = step(state, _batch(0))
    assert float(first["loss"]) == float(again["loss"])
    _, later = step(state.replace(step=state.step + 1), _batch(0))
    _, other = step(state.replace(key=state.key + np.uint32(1)), _batch(0))
    assert len({float(m["loss"]) for m in (first, later, other)}) == 3

    # Two equal microbatches with equal masks would have equal gradients, hence the loss of one alone.
    half = batch_of(0, 2)
    both = Batch({name: np.concatenate([value, value]) for name, value in half.items()})
    alone, small = _start(1, rows=2)
    _, one = alone(small, Batch(half, reset=np.bool_(False)))
    _, two = step(state, both)
    assert float(one["loss"]) != pytest.approx(float(two["loss"]), rel=1e-6)


def test_metrics_and_counters():
    step, state = _start(2)
    schedule = make_schedule(OPTIMIZER, 10)
    for i in range(3):
        before = float(OBJECTIVE.loss(state.params, state.memory.reshape(-1), _batch(i).arrays, None)[0]) / 12
        state, metrics = step(state, _batch(i))
        assert float(metrics["learning_rate"]) == pytest.approx(float(schedule(i)))
        assert float(metrics["loss"]) == pytest.approx(before, rel=0.2)  # without dropout
        assert float(metrics["grad_norm"]) > 0
    assert int(state.step) == 3


def test_dropout_and_samples_use_separate_streams():
    assert random_streams(None) == {}
    streams = random_streams(jax.random.key(0))
    drawn = {name: float(jax.random.uniform(key)) for name, key in streams.items()}
    assert drawn.keys() == {"dropout", "sample"}
    assert drawn["dropout"] != drawn["sample"]
