import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import MECHANISMS, FullConfig
from brl_jax.models import Classifier, DecoderConfig, DecoderLM, EncoderConfig
from train.engine.errors import UserError
from train.engine.optimizer import OptimizerConfig, decayed, make_optimizer, make_schedule, optimizer_of
from train.tasks.mup import mup_rates


def _after(step, start, stop):
    """The share of a decay from `start` to the last step that is behind a step."""
    return min(1, max(0, (step - start) / (stop - 1 - start)))


SHAPES = {
    "constant": lambda step: 1,
    "cosine": lambda step: 0.25 + 0.75 * (1 + math.cos(math.pi * _after(step, 4, 20))) / 2,
    "linear": lambda step: 1 - 0.75 * _after(step, 4, 20),
    "wsd": lambda step: 1 - 0.75 * _after(step, 14, 20),
    "inverse_sqrt": lambda step: (4 / step) ** 0.5,
}


@pytest.mark.parametrize("decay", SHAPES)
def test_rates_follow_their_formula(decay):
    """They rise over four steps; the last of 20 has the final share, which no later step undercuts."""
    options = {"final_share": 0.25} if decay not in ("constant", "inverse_sqrt") else {}
    options |= {"decay_share": 0.25} if decay == "wsd" else {}
    schedule = make_schedule(OptimizerConfig(learning_rate=2.0, warmup_steps=4, decay=decay, **options), 20)
    for step in (*range(25), 6400):
        expected = 2.0 * (step + 1) / 4 if step < 4 else 2.0 * SHAPES[decay](step)
        np.testing.assert_allclose(schedule(step), expected, rtol=1e-5)
    flat = make_schedule(OptimizerConfig(learning_rate=3.0, warmup_steps=0, decay=decay, **options), steps=10)
    assert float(flat(0)) == pytest.approx(3.0)
    if options:
        assert float(flat(9)) == pytest.approx(0.75)


@pytest.mark.parametrize("decay", ["cosine", "linear"])
def test_more_steps_than_an_int32_counts(decay):
    schedule = make_schedule(OptimizerConfig(learning_rate=3.0, warmup_steps=4, decay=decay), steps=10**10)
    assert float(schedule(5_000)) == pytest.approx(3.0, rel=1e-5)


@pytest.mark.parametrize("name", MECHANISMS)
def test_every_mechanisms_matrices_decay_and_its_biases_do_not(name):
    """Kernels are matrices, except those of convolutions, which have a few numbers per channel."""
    kind = MECHANISMS[name]
    fields = {field.name for field in dataclasses.fields(kind)}
    mechanism = kind(**({"max_length": 64} if "max_length" in fields else {}))
    options = {"num_layers": 4, "d_model": 32, "num_heads": 2, "d_ff": 64, "use_bias": True}
    if kind.causal:
        model = DecoderLM(DecoderConfig(vocab_size=32, mechanism=mechanism, **options))
    else:
        model = Classifier(EncoderConfig(vocab_size=32, mechanism=mechanism, max_length=64, **options))
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 64), jnp.int32))["params"]
    mask = jax.tree_util.tree_leaves_with_path(decayed(boxed))
    decays = {jax.tree_util.keystr(path, simple=True, separator="/"): value for path, value in mask}
    kernels = {path for path in decays if path.endswith("/kernel")}
    convolutions = {path for path in kernels if path.endswith("conv/kernel")}
    small = {path for path in decays if path.endswith(("/bias", "_bias", "/scale", "/gamma", "/lambda"))}
    assert kernels > convolutions
    assert {path for path in kernels if decays[path]} == kernels - convolutions
    assert not any(decays[path] for path in small)
    assert all(decays[path] for path in decays if path.endswith("embedding"))
    rates = jax.tree_util.tree_leaves_with_path(mup_rates(boxed, base_width=8, width=32))
    assert all(
        rate == 1.0 for path, rate in rates if jax.tree_util.keystr(path, simple=True, separator="/") in small
    )


def test_without_names_the_shape_decides_and_a_bias_stays():
    shapes = {"w": (2, 2), "b": (2,), "bias": (2, 2), "conv_bias": (2, 2), "biased": (2, 2)}
    params = {name: jnp.ones(shape) for name, shape in shapes.items()}
    assert {name for name, decays in decayed(params).items() if decays} == {"w", "biased"}


@pytest.mark.parametrize("clip_norm", [1.0, 0.0])
def test_two_steps_of_adamw(clip_norm):
    """Adam's moments are of clipped gradients, so a large one does not outweigh the next; 0 switches clipping off.
    Rates of parameters (muP) scale the step and not the decay."""
    config = OptimizerConfig(
        learning_rate=0.1,
        warmup_steps=0,
        decay="constant",
        weight_decay=0.5,
        clip_norm=clip_norm,
        epsilon=1e-6,
    )
    params = {"w": jnp.array([[1.0, -2.0]]), "b": jnp.array([3.0])}
    grads = (
        {"w": jnp.array([[30.0, 0.0]]), "b": jnp.array([40.0])},
        {"w": jnp.array([[0.5, -0.5]]), "b": jnp.zeros(1)},
    )
    rates = {"w": 0.25, "b": 2.0}
    optimizer = make_optimizer(config, make_schedule(config, 10), {"w": True, "b": False}, rates=rates)
    state = optimizer.init(params)
    large = 50.0 if clip_norm else 1.0  # the first gradients' norm; the second one's is below 1
    for step in (1, 2):
        updates, state = optimizer.update(grads[step - 1], state, params)
        for name, decay in (("w", 0.5), ("b", 0.0)):
            first, second = (np.asarray(grad[name], np.float64) for grad in grads)
            given = [first / large, second][:step]
            mean = sum(0.1 * 0.9 ** (step - 1 - i) * g for i, g in enumerate(given)) / (1 - 0.9**step)
            square = sum(0.05 * 0.95 ** (step - 1 - i) * g**2 for i, g in enumerate(given)) / (1 - 0.95**step)
            scaled = rates[name] * mean / (np.sqrt(square) + 1e-6)
            expected = -0.1 * (scaled + decay * np.asarray(params[name]))
            np.testing.assert_allclose(updates[name], expected, rtol=1e-5)


def _orthogonalised(matrix):
    """Jordan et al. 2024: five steps of an odd polynomial that takes singular values near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


@pytest.mark.slow
def test_two_steps_of_muon():
    """Heads are one matrix, stacked layers are one each; embeddings, read-outs and vectors keep AdamW."""
    settings = {"learning_rate": 0.1, "warmup_steps": 0, "decay": "constant", "clip_norm": 0.0}
    model = DecoderLM(
        DecoderConfig(
            num_layers=2,
            d_model=8,
            num_heads=2,
            d_ff=12,
            vocab_size=16,
            tied_embeddings=False,
            mechanism=FullConfig(),
        )
    )
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    muon, adamw = (
        optimizer_of(OptimizerConfig(optimizer=name, **settings), 10, boxed, None)[0]
        for name in ("muon", "adamw")
    )
    rng = np.random.default_rng(0)
    params, *grads = (
        jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), jnp.float32), nn.unbox(boxed))
        for _ in range(3)
    )
    states = [muon.init(params), adamw.init(params)]
    for grad in grads:
        (ours, states[0]), (theirs, states[1]) = (
            optimizer.update(grad, state, params) for optimizer, state in zip((muon, adamw), states)
        )
    leaves = [dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (params, *grads, ours, theirs)]
    moved = set()
    for path in leaves[0]:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        param, first, second, update, adams = (np.asarray(tree[path], np.float64) for tree in leaves)
        if not name.endswith("/kernel") or "layers_0" not in name:
            np.testing.assert_array_equal(update, adams, err_msg=name)
            continue
        moved.add(name.split("/")[-2])
        inputs = 16 // 2 if name.endswith("out/kernel") else param.shape[1]
        mean = 0.95 * 0.05 * first + 0.05 * second
        ahead = 0.95 * mean / (1 - 0.95**3) + 0.05 * second / (1 - 0.95**2)  # Nesterov's, without its bias
        for layer in range(2):
            matrix = ahead[layer].reshape(inputs, -1)
            direction = _orthogonalised(matrix) * 0.2 * math.sqrt(max(matrix.shape))
            expected = -0.1 * (direction.reshape(param.shape[1:]) + 0.1 * param[layer])
            np.testing.assert_allclose(update[layer], expected, rtol=2e-4, atol=2e-5, err_msg=name)
    assert moved == {"query", "key", "value", "out", "gate", "up", "down"}


def test_muon_refuses_mup():
    with pytest.raises(UserError, match=r"--optimizer muon: .*mup_base_width"):
        optimizer_of(OptimizerConfig(optimizer="muon"), 10, {"w": jnp.ones((2, 2))}, {"w": 1.0})
