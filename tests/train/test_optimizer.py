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


def test_only_matrices_decay():
    model = DecoderLM(DecoderConfig(num_layers=2, d_model=8, num_heads=2, d_ff=12, use_bias=True))
    boxed = jax.eval_shape(model.init, jax.random.key(0), jnp.zeros((1, 4), jnp.int32))["params"]
    mask = jax.tree_util.tree_leaves_with_path(decayed(boxed))
    leaves = dict(jax.tree_util.tree_leaves_with_path(nn.unbox(boxed)))
    decays = {"/".join(key.key for key in path): value for path, value in mask}
    shapes = {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves.items()}
    norms = [name for name in decays if name.endswith("/scale")]
    biases = [name for name in decays if name.endswith(("/bias", "/gamma", "/lambda"))]
    kernels = [name for name in decays if name.endswith("/kernel")]
    assert norms
    assert biases
    assert kernels
    assert not any(decays[name] for name in norms + biases)
    assert all(decays[name] for name in kernels)
    assert decays["embedding"]
    # Stacked over layers, a norm's scale has two axes, so its shape alone would look like a matrix.
    assert any(len(shapes[name]) == 2 for name in norms)
    assert any(len(shapes[name]) == 3 for name in biases)
    assert decayed({"w": jnp.ones((2, 2)), "b": jnp.ones(2)}) == {"w": True, "b": False}
    both = {"bias": jnp.ones((2, 2)), "conv_bias": jnp.ones((2, 2)), "biased": jnp.ones((2, 2))}
    assert decayed(both) == {"bias": False, "conv_bias": False, "biased": True}


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
    small = {path for path in decays if path.endswith(("/bias", "_bias", "/scale"))}
    assert kernels > convolutions
    assert {path for path in kernels if decays[path]} == kernels - convolutions
    assert not any(decays[path] for path in small)
    rates = jax.tree_util.tree_leaves_with_path(mup_rates(boxed, base_width=8, width=32))
    assert all(
        rate == 1.0 for path, rate in rates if jax.tree_util.keystr(path, simple=True, separator="/") in small
    )


def test_one_step_of_adamw():
    config = OptimizerConfig(
        learning_rate=0.1, warmup_steps=0, decay="constant", weight_decay=0.5, clip_norm=1.0, epsilon=1e-6
    )
    params = {"w": jnp.array([[1.0, -2.0]]), "b": jnp.array([3.0])}
    grads = {"w": jnp.array([[3.0, 0.0]]), "b": jnp.array([4.0])}
    optimizer = make_optimizer(config, make_schedule(config, 10), {"w": True, "b": False})
    updates, _ = optimizer.update(grads, optimizer.init(params), params)

    def expected(param, grad, decay):
        grad = grad / 5.0  # the gradients' norm is 5
        mean, square = 0.1 * grad / (1 - 0.9), 0.05 * grad**2 / (1 - 0.95)
        return -0.1 * (mean / (math.sqrt(square) + 1e-6) + decay * param)

    np.testing.assert_allclose(updates["w"], [[expected(1.0, 3.0, 0.5), expected(-2.0, 0.0, 0.5)]], rtol=1e-5)
    np.testing.assert_allclose(updates["b"], [expected(3.0, 4.0, 0.0)], rtol=1e-5)


def test_gradients_are_clipped_before_adam():
    """Adam's moments are of clipped gradients, so a large one does not outweigh the next."""
    config = OptimizerConfig(
        learning_rate=0.1, warmup_steps=0, decay="constant", weight_decay=0.0, clip_norm=1.0, epsilon=1e-8
    )
    params = {"w": jnp.zeros((1, 2))}
    optimizer = make_optimizer(config, make_schedule(config, 10), {"w": True})
    state = optimizer.init(params)
    _, state = optimizer.update({"w": jnp.array([[30.0, 40.0]])}, state, params)
    updates, _ = optimizer.update({"w": jnp.array([[0.5, -0.5]])}, state, params)
    first, second = np.array([0.6, 0.8]), np.array([0.5, -0.5])  # norm 50, clipped to 1; norm below 1
    mean = (0.9 * 0.1 * first + 0.1 * second) / (1 - 0.9**2)
    square = (0.95 * 0.05 * first**2 + 0.05 * second**2) / (1 - 0.95**2)
    np.testing.assert_allclose(updates["w"][0], -0.1 * mean / np.sqrt(square), rtol=1e-5)


def _orthogonalised(matrix):
    """Jordan et al. 2024: five steps of an odd polynomial that takes singular values near 1."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / np.linalg.norm(matrix)
    for _ in range(5):
        square = x @ x.T
        x = a * x + (b * square + c * square @ square) @ x
    return x


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


def test_clipping_can_be_switched_off():
    config = OptimizerConfig(warmup_steps=0, weight_decay=0.0, clip_norm=0.0)
    optimizer = make_optimizer(config, make_schedule(config, 10), {"w": True})
    state = optimizer.init({"w": jnp.ones((2, 2))})
    _, state = optimizer.update({"w": jnp.full((2, 2), 100.0)}, state, {"w": jnp.ones((2, 2))})
    assert max(float(jnp.max(leaf)) for leaf in jax.tree.leaves(state)) == pytest.approx(0.05 * 100.0**2)
