"""The laws that every listed mechanism keeps (one suite; a new mechanism joins by being listed)."""

from __future__ import annotations

import dataclasses
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import MECHANISMS, BRLConfig, HopfieldConfig, MLRConfig
from brl_jax.models import Stack
from tests.laws.cases import CASES, KERNELS, dimensions, named
from tests.laws.networks import LAYERS, LENGTH, as_float64, network, relative_error, slope_of
from tests.laws.oracles import NETWORKS as SOFTMAX_NETWORKS
from tests.laws.state_oracles import NETWORKS as STATE_NETWORKS
from tests.laws.structured_oracles import NETWORKS as STRUCTURED_NETWORKS

NETWORKS = {**SOFTMAX_NETWORKS, **STATE_NETWORKS, **STRUCTURED_NETWORKS}

CAUSAL = named(lambda m: m.causal)
FORMS = [(name, True) for name in CAUSAL] + [(name, False) for name in named(lambda m: m.bidirectional)]
FORM_IDS = [f"{name}-{'causal' if is_causal else 'bidirectional'}" for name, is_causal in FORMS]


# Each case in one form, the causal one where there is one; and one variant of each mechanism, for laws that do not
# hang on its details.
EACH = [(name, CASES[name].causal) for name in CASES]
FIRST = [next(form for form in EACH if type(CASES[form[0]]) is kind) for kind in MECHANISMS.values()]


def mechanism_of(name: str) -> str:
    return next(kind for kind, cls in MECHANISMS.items() if type(CASES[name]) is cls)


@pytest.mark.parametrize("name", CAUSAL)
def test_law_1_causal(name):
    """Changing token t changes no output before t, bitwise, and does change the output at t."""
    net = network(name, True)
    before = np.asarray(net.run(net.variables, net.x))
    for t in (0, 1, 4, 7, 8, 9, 15, 16, 17, 23, 24, LENGTH - 1):
        after = np.asarray(net.run(net.variables, net.x.at[:, t].set(3.0)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any()


@pytest.mark.parametrize("name", CAUSAL)
def test_law_2_generation_is_training(name):
    """Prefill of any length and single steps give the parallel forward's outputs, from one structure of cache."""
    net = network(name, True)
    expected = net.run(net.variables, net.x)
    step = jax.jit(lambda v, x, cache: net.stack.apply(v, x, cache=cache))
    # Chunks of one size begin anywhere in a block, end on its border, or span several.
    for sizes in ([11, 1, 1, 11, 1, 1, 1, 1, 1], [1] * 7 + [11, 11]):
        cache = net.stack.init_cache(2, LENGTH)
        outputs, start = [], 0
        for size in sizes:
            y, new = step(net.variables, net.x[:, start : start + size], cache)
            assert jax.tree.structure(new) == jax.tree.structure(cache)
            assert [a.shape for a in jax.tree.leaves(new)] == [a.shape for a in jax.tree.leaves(cache)]
            cache, start = new, start + size
            outputs.append(y)
        # Relative to the outputs' size, which is that of a norm's: single numbers among them may be near 0.
        size = float(jnp.sqrt(jnp.mean(jnp.square(expected))))
        np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected, rtol=1e-4, atol=1e-4 * size)


@pytest.mark.parametrize("name", named(lambda m: m.causal and isinstance(m, BRLConfig)))
def test_law_2_a_stream_goes_on(name):
    """Batches of whole blocks with the memory of those before them give the parallel forward's outputs, but for the
    window, which begins anew with every batch: here it is the token itself."""
    net, short = network(name, True), dataclasses.replace(CASES[name], window=1)
    stack = Stack((short,) * LAYERS, net.stack.dimensions)
    expected = jax.jit(lambda v, x: stack.apply(v, x)[0])(net.variables, net.x[:, :24])
    step = jax.jit(lambda v, x, memory: stack.apply(v, x, cache=memory))
    # A batch may be longer than what is kept of it, or shorter.
    for sizes in ((16, 8), (8, 8, 8)):
        memory, outputs, start = stack.init_memory(2), [], 0
        for size in sizes:
            y, memory = step(net.variables, net.x[:, start : start + size], memory)
            outputs.append(y)
            start += size
        assert relative_error(jnp.concatenate(outputs, axis=1), expected) < 1e-5
    alone, _ = step(net.variables, net.x[:, 16:24], stack.init_memory(2))
    assert relative_error(alone, expected[:, 16:]) > 1e-2


@pytest.mark.parametrize(("name", "is_causal"), FORMS, ids=FORM_IDS)
def test_law_3_oracle(name, is_causal):
    """Outputs and gradients equal the float64 reference's: float32 to 1e-4, bfloat16 outputs to 2e-2 of the norm."""
    net = network(name, is_causal)
    d = net.stack.dimensions
    oracle = NETWORKS[mechanism_of(name)]
    params, xs = as_float64(net.variables["params"]), as_float64(net.x)
    expected = np.stack([oracle(params, net.mechanism, d, x) for x in xs])
    assert relative_error(net.run(net.variables, net.x), expected) < 1e-4

    half = dataclasses.replace(d, dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote bfloat16 implicitly
        rough = jax.jit(net.stack.clone(dimensions=half).apply)(net.variables, net.x.astype(jnp.bfloat16))[0]
    assert rough.dtype == jnp.bfloat16
    # Where rounding the operands alone moves the exact result further than that, twice as far is allowed.
    rounded = as_float64(
        jax.tree.map(lambda a: jnp.asarray(a, jnp.bfloat16), (net.variables["params"], net.x))
    )
    operands_error = relative_error(
        np.stack([oracle(rounded[0], net.mechanism, d, x) for x in rounded[1]]), expected
    )
    assert relative_error(rough, expected) < max(2e-2, 2 * operands_error)

    # One sequence is enough for the gradient; every parameter is moved along a direction of its own.
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(expected[0].shape)
    gradient, gradient_x = net.slope(net.variables, net.x[:1], jnp.asarray(weight[None], jnp.float32))
    paths, tree = jax.tree_util.tree_flatten_with_path(params)
    actual = dict(jax.tree_util.tree_flatten_with_path(as_float64(gradient["params"]))[0])

    def derivative(path, direction, x_direction):
        stepped = [leaf + 1e-30j * direction if p == path else leaf for p, leaf in paths]
        x = xs[0] + (0.0 if x_direction is None else 1e-30j * x_direction)
        return (
            np.imag((oracle(jax.tree.unflatten(tree, stepped), net.mechanism, d, x) * weight).sum()) / 1e-30
        )

    checks = [(path, rng.standard_normal(leaf.shape), None) for path, leaf in paths]
    checks += [(None, None, rng.standard_normal(xs[0].shape)) for _ in range(3)]
    for path, direction, x_direction in checks:
        expected_slope = derivative(path, direction, x_direction)
        grad = np.asarray(gradient_x[0], np.float64) if path is None else actual[path]
        along = x_direction if path is None else direction
        # A leaf that has no influence on this sequence must have no gradient either.
        scale = np.linalg.norm(grad) * np.linalg.norm(along) / np.sqrt(along.size)
        assert abs((grad * along).sum() - expected_slope) <= 1e-4 * max(scale, abs(expected_slope)) + 1e-6, (
            jax.tree_util.keystr(path) if path else "x"
        )


@pytest.mark.parametrize("name", named(lambda m: m.packs and m.causal))
def test_law_4_packing(name):
    """Two sequences packed in one row give what each gives alone, outputs and gradients."""
    net = network(name, True)
    cut = 12
    segments = jnp.where(jnp.arange(LENGTH) < cut, 1, 2)[None]
    positions = jnp.where(jnp.arange(LENGTH) < cut, jnp.arange(LENGTH), jnp.arange(LENGTH) - cut)[None]
    x = net.x[:1]
    weight = jnp.asarray(np.random.default_rng(0).standard_normal(x.shape), jnp.float32)
    # What follows the shorter one changes nothing of it (law 1), so that both are rows of one program.
    behind = ((0, 0), (0, LENGTH - 2 * cut), (0, 0))
    rows, weights = (jnp.concatenate([jnp.pad(a[:, :cut], behind), a[:, cut:]]) for a in (x, weight))

    def outputs_and_gradients(x, weight, **packing):
        def loss(v):
            y = net.stack.apply(v, x, **packing)[0]
            return jnp.sum(y * weight), y

        gradients, y = jax.jit(jax.grad(loss, has_aux=True))(net.variables)
        return y, jax.tree.leaves(gradients)

    y, gradients = outputs_and_gradients(x, weight, segment_ids=segments, positions=positions)
    alone, expected = outputs_and_gradients(rows, weights)
    assert relative_error(y[0], np.concatenate([alone[0, :cut], alone[1]])) < 1e-5
    for a, b in zip(gradients, expected, strict=True):
        assert relative_error(a, b) < 1e-4


@pytest.mark.parametrize("name", named(lambda m: not m.packs))
def test_law_4_packing_is_refused(name):
    net = network(name, CASES[name].causal)
    with pytest.raises(ValueError, match="segment_ids"):
        net.stack.apply(net.variables, net.x[:, :5], segment_ids=jnp.ones((2, 5), jnp.int32))


@pytest.mark.parametrize("name", named(lambda m: m.bidirectional))
def test_law_4_padding(name):
    """Padding changes no output of the real tokens, and its content no gradient."""
    net = network(name, False)
    real = 17
    lengths = jnp.array([real, LENGTH], jnp.int32)

    def loss(v, x):
        y = net.stack.apply(v, x, lengths=lengths)[0]
        return jnp.sum(y[0, :real] ** 3), y

    grad = jax.jit(jax.grad(loss, has_aux=True))
    poisoned = net.x.at[0, real:].set(50.0)
    gradients, padded = grad(net.variables, net.x)
    poisoned_gradients, poisoned_padded = grad(net.variables, poisoned)
    # BigBird draws its random blocks anew for each number of blocks: a longer row is another pattern by definition.
    if name != "local-bigbird":
        assert relative_error(padded[0, :real], net.run(net.variables, net.x[:1, :real])[0]) < 1e-5
    assert relative_error(padded[1], net.run(net.variables, net.x)[1]) < 1e-5
    np.testing.assert_array_equal(poisoned_padded[0, :real], padded[0, :real])
    for a, b in zip(*map(jax.tree.leaves, (gradients, poisoned_gradients))):
        assert np.isfinite(np.asarray(b)).all()
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(("name", "is_causal"), [form for form in EACH if CASES[form[0]].linear_cost])
def test_law_6_linear(name, is_causal):
    """Doubling the length at most doubles (2.2) the temporary memory of forward and backward; nothing is n x n."""
    mechanism = default_size(name)
    d = dimensions(is_causal, d_model=32, head_dim=8, d_ff=32)
    stack = Stack((mechanism,), d)

    token = jax.ShapeDtypeStruct((1, 1, 32), jnp.float32)
    variables = jax.eval_shape(lambda key, x: nn.unbox(stack.init(key, x)), jax.random.key(0), token)

    def compiled(n):
        x = jax.ShapeDtypeStruct((1, n, 32), jnp.float32)
        return jax.jit(jax.grad(lambda v, x: stack.apply(v, x)[0].sum())).lower(variables, x).compile()

    short, long = compiled(2**14), compiled(2**15)
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (short, long)]
    assert sizes[1] <= 2.2 * sizes[0], sizes
    for shape in re.findall(r"\w+\[([\d,]+)\]", short.as_text()):
        assert np.prod([int(n) for n in shape.split(",")], dtype=np.int64) < 2**28 / 4, shape


def default_size(name):
    """The case with windows, blocks and token counts as in use."""
    sizes = {"window": 256, "num_compressed": 64, "block_size": 512, "history_size": 512, "num_global": 16}
    sizes |= {"num_projected": 256, "max_length": 2**15, "chunk_size": 128}
    fields = {field.name for field in dataclasses.fields(CASES[name])}
    return dataclasses.replace(CASES[name], **{k: v for k, v in sizes.items() if k in fields})


@pytest.mark.parametrize(("name", "is_causal"), FIRST)
def test_law_7_composes(name, is_causal):
    """vmap, checkpoint, 64-bit mode, one token (jit, grad, scan, grouped heads and ragged lengths run in all laws)."""
    net = network(name, is_causal)
    expected = net.run(net.variables, net.x)
    mapped = jax.jit(jax.vmap(lambda x: net.stack.apply(net.variables, x[None])[0][0]))(net.x)
    assert relative_error(mapped, expected) < 1e-5
    weight = np.random.default_rng(0).standard_normal(expected[:1].shape)
    arguments = (net.variables, net.x[:1], jnp.asarray(weight, jnp.float32))
    remat = jax.jit(slope_of(net.stack.clone(remat="full")))
    for a, b in zip(*(jax.tree.leaves(slope(*arguments)) for slope in (net.slope, remat))):
        assert relative_error(a, b) < 1e-4
    # Where a Python int becomes an int64, which users mix with int32 by JAX's usual rules.
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(jax.grad(lambda v: net.stack.apply(v, net.x)[0].sum()), net.variables)
    one = net.run(net.variables, net.x[:, :1])
    assert one.shape == (2, 1, 16)
    if is_causal:
        assert relative_error(one, expected[:, :1]) < 1e-5


@pytest.mark.parametrize(("name", "is_causal"), EACH)
def test_law_8_lowers_for_tpu(name, is_causal):
    """A host without a TPU lowers training for it (compilation: tests/laws/test_tpu.py)."""
    net = network(name, is_causal)
    stack = net.stack.clone(dimensions=dataclasses.replace(net.stack.dimensions, implementation=None))
    step = jax.jit(jax.grad(lambda v, x: stack.apply(v, x)[0].sum()))
    text = step.trace(net.variables, net.x).lower(lowering_platforms=("tpu",)).as_text()
    assert "func.func public @main" in text
    # No kernel reads BigBird's random blocks, or adds a bias.
    assert ("tpu_custom_call" in text) == (
        mechanism_of(name) in KERNELS and name not in ("local-bigbird", "brl-output-equations")
    )


def test_law_5_window_over_everything_is_full_attention():
    full = network("full", True)
    wide = Stack((dataclasses.replace(CASES["local-sliding"], window=LENGTH),) * LAYERS, dimensions(True))
    y = jax.jit(lambda v, x: wide.apply(v, x)[0])(full.variables, full.x)
    assert relative_error(y, full.run(full.variables, full.x)) < 1e-5
    narrow = Stack(
        (dataclasses.replace(CASES["local-sliding"], window=LENGTH - 1),) * LAYERS, dimensions(True)
    )
    assert (
        relative_error(jax.jit(narrow.apply)(full.variables, full.x)[0], full.run(full.variables, full.x))
        > 1e-4
    )


def test_law_5_one_diagonal_block_is_full_attention():
    full = network("full", True)
    wide, narrow = (
        Stack((dataclasses.replace(CASES["diag-softmax"], block_size=size),) * LAYERS, dimensions(True))
        for size in (LENGTH, LENGTH - 1)
    )
    expected = full.run(full.variables, full.x)
    assert relative_error(jax.jit(lambda v, x: wide.apply(v, x)[0])(full.variables, full.x), expected) < 1e-5
    assert relative_error(jax.jit(narrow.apply)(full.variables, full.x)[0], expected) > 1e-4


def test_law_5_one_hopfield_step_is_full_attention():
    full = network("full", True)
    one, two = (Stack((HopfieldConfig(steps=steps),) * LAYERS, dimensions(True)) for steps in (1, 2))
    expected = full.run(full.variables, full.x)
    assert relative_error(jax.jit(lambda v, x: one.apply(v, x)[0])(full.variables, full.x), expected) < 1e-6
    assert relative_error(jax.jit(two.apply)(full.variables, full.x)[0], expected) > 1e-2


def test_law_5_one_mlr_level_is_full_attention():
    full = network("full", True)
    # The scale 1 / r of a level against full attention's 1 / sqrt(head_dim), here 1 / 4 and 1 / 2.
    one, two = (
        Stack(
            (MLRConfig(ranks=ranks, context=16, qk_norm=False, score_scale=2.0),) * LAYERS, dimensions(True)
        )
        for ranks in ((4,), (2, 2))
    )
    expected = full.run(full.variables, full.x)
    assert relative_error(jax.jit(lambda v, x: one.apply(v, x)[0])(full.variables, full.x), expected) < 1e-6
    assert relative_error(jax.jit(two.apply)(full.variables, full.x)[0], expected) > 1e-2


@pytest.mark.parametrize("memory", ["output", "layer"])
def test_law_5_brl_without_strength_is_local_attention(memory):
    net = network(f"brl-{memory}", True)
    params = net.variables["params"]
    block = params["layers_0"]["block_0"]
    strength = jnp.zeros_like(block["mixer"]["lambda"])
    without = {**block, "mixer": {**block["mixer"], "lambda": strength}}
    local = {**block, "mixer": block["mixer"]["local"]}
    stack = Stack((net.mechanism.local,) * LAYERS, dimensions(True))
    y = net.run({"params": {**params, "layers_0": {"block_0": without}}}, net.x)
    expected = stack.apply(
        {"params": {"layers_0": {"block_0": local}, "final_norm": params["final_norm"]}}, net.x
    )[0]
    assert relative_error(y, expected) < 1e-6
    assert relative_error(net.run(net.variables, net.x), expected) > 1e-2
