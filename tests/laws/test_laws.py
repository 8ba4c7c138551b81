"""The laws that every listed mechanism keeps (one suite; a new mechanism joins by being listed)."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.attention.core.segments import places_in_sequences
from brl_jax.layers import MECHANISMS, BRLConfig, DiagConfig, HopfieldConfig, LocalConfig, MLRConfig
from brl_jax.models import Stack, make_stack
from tests.laws.cases import (
    CASES,
    COMPILED,
    ENGINES,
    FAST_ENGINES,
    FAST_KERNELS,
    FAST_MEMORY,
    KERNELS,
    LEADING,
    NEW,
    dimensions,
    named,
)
from tests.laws.networks import LAYERS, LENGTH, both_of, network
from tests.marks import slow_unless
from tests.oracles import compressed, dense, local, low_rank, recurrent, sorting, structured, tlinformer
from tests.support.numbers import as_float64, relative_error

NETWORKS = {
    name: network
    for family in (compressed, dense, local, low_rank, recurrent, sorting, structured, tlinformer)
    for name, network in family.NETWORKS.items()
}

CAUSAL = named(lambda m: m.causal)
# The fast part of the suite runs laws that need every mechanism on these, and the other laws on NEW.
BASIC = {*LEADING, *NEW}


# Each case in one form (causal if possible), then the other form of cases that have both, and one variant of each
# mechanism for laws that do not depend on its details.
EACH = [(name, CASES[name].causal) for name in CASES]
OTHER = [(name, False) for name in named(lambda m: m.causal and m.bidirectional)]
FIRST = [(name, CASES[name].causal) for name in LEADING]
FORMS = [*slow_unless(EACH, BASIC), *slow_unless(OTHER, NEW)]


def form_id(value: Any) -> str | None:
    return None if isinstance(value, str) else "causal" if value else "bidirectional"


def mechanism_of(name: str) -> str:
    return next(kind for kind, cls in MECHANISMS.items() if type(CASES[name]) is cls)


def oracle_of(kind: str) -> Any:
    """The float64 network of a listed mechanism."""
    if kind not in NETWORKS:
        pytest.fail(
            f"the mechanism {kind!r} is listed in MECHANISMS and has no oracle: write its network in float64 NumPy, "
            f"straight from the formulas, and add it as {kind!r} to the dictionary NETWORKS of its family's file in "
            "tests/oracles"
        )
    return NETWORKS[kind]


@pytest.mark.parametrize("kind", MECHANISMS)
def test_every_listed_mechanism_has_an_oracle(kind):
    assert callable(oracle_of(kind))


def test_a_missing_oracle_says_where_it_belongs():
    with pytest.raises(
        pytest.fail.Exception, match=r"'novel' to the dictionary NETWORKS of .* tests/oracles"
    ):
        oracle_of("novel")


def changed(x: np.ndarray, place: Any, value: float) -> np.ndarray:
    """A copy of x with another value at a place."""
    x = x.copy()
    x[place] = value
    return x


@pytest.mark.parametrize("name", slow_unless(CAUSAL, BASIC))
def test_law_1_causal(name):
    """Changing token t changes no output before t, bitwise, and does change the output at t."""
    net = network(name, True)
    before = np.asarray(net.run(net.variables, net.x))
    for t in (0, 1, 4, 7, 8, 9, 15, 16, 17, 23, 24, LENGTH - 1):
        after = np.asarray(net.run(net.variables, changed(net.x, (slice(None), t), 3.0)))
        np.testing.assert_array_equal(after[:, :t], before[:, :t])
        assert (after[:, t] != before[:, t]).any()


@pytest.mark.parametrize("name", slow_unless(CAUSAL, BASIC))
def test_law_2_generation_is_training(name):
    """Prefill of any length and single steps give the parallel forward's outputs, with one cache structure."""
    net = network(name, True)
    expected = net.run(net.variables, net.x)
    step = jax.jit(lambda v, x, cache: net.stack.apply(v, x, cache=cache))
    # Chunks of one size begin anywhere in a block, end at its border, or span several.
    for sizes in ([11, 1, 1, 11, 1, 1, 1, 1, 1], [1] * 7 + [11, 11]):
        cache = net.stack.init_cache(2, LENGTH)
        outputs, start = [], 0
        for size in sizes:
            y, new = step(net.variables, net.x[:, start : start + size], cache)
            assert jax.tree.structure(new) == jax.tree.structure(cache)
            assert [a.shape for a in jax.tree.leaves(new)] == [a.shape for a in jax.tree.leaves(cache)]
            cache, start = new, start + size
            outputs.append(y)
        # Relative to the size of the outputs, since some single numbers are near 0.
        size = float(jnp.sqrt(jnp.mean(jnp.square(expected))))
        np.testing.assert_allclose(jnp.concatenate(outputs, axis=1), expected, rtol=1e-4, atol=1e-4 * size)


@pytest.mark.parametrize("name", slow_unless(named(lambda m: m.causal and isinstance(m, BRLConfig)), NEW))
def test_law_2_a_stream_goes_on(name):
    """Batches of whole blocks, each with the memory of earlier batches, give the parallel forward's outputs.

    The window restarts with every batch, so here it is only the token itself."""
    net = network(name, True)
    short = dataclasses.replace(CASES[name], window=1, pattern="sliding")
    stack = Stack((short,) * LAYERS, net.stack.dimensions)
    expected = jax.jit(lambda v, x: stack.apply(v, x)[0])(net.variables, net.x[:, :24])
    step = jax.jit(lambda v, x, memory: stack.apply(v, x, cache=memory))
    # A batch may be longer or shorter than the stored history.
    for sizes in ((16, 8), (8, 8, 8)):
        memory, outputs, start = stack.init_memory(2), [], 0
        for size in sizes:
            y, memory = step(net.variables, net.x[:, start : start + size], memory)
            outputs.append(y)
            start += size
        assert relative_error(jnp.concatenate(outputs, axis=1), expected) < 1e-5
    alone, _ = step(net.variables, net.x[:, 16:24], stack.init_memory(2))
    assert relative_error(alone, expected[:, 16:]) > 1e-2


@pytest.mark.parametrize("name", ["brl-output", "brl-layer"])
def test_law_2_a_memory_has_no_gradient(name):
    """A batch reads the memory of the previous one, and sends no gradient back to it."""
    net = network(name, True)

    def second(first):
        memory = net.stack.apply(net.variables, first, cache=net.stack.init_memory(2))[1]
        y = net.stack.apply(net.variables, net.x[:, 8:16], cache=memory)[0]
        return jnp.sum(y * net.x[:, 16:24]), y

    gradient = jax.jit(jax.grad(second, has_aux=True))
    (zero, y), (_, other) = gradient(net.x[:, :8]), gradient(net.x[:, 16:24])
    assert (np.asarray(y) != np.asarray(other)).any()
    assert not np.asarray(zero).any()


@pytest.mark.parametrize(("name", "is_causal"), FORMS, ids=form_id)
def test_law_3_oracle(name, is_causal):
    """Outputs and gradients in float32 equal the float64 reference's to 1e-4."""
    net = network(name, is_causal)
    d = net.stack.dimensions
    oracle = oracle_of(mechanism_of(name))
    params, xs = as_float64(net.variables["params"]), as_float64(net.x)
    expected = np.stack([oracle(params, net.mechanism, d, x) for x in xs])

    # One sequence is enough for the gradient. Each parameter is checked along a different random direction.
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(expected[0].shape)
    weights = np.stack([weight, np.zeros_like(weight)]).astype(np.float32)
    y, (gradient, gradient_x) = net.both(net.variables, net.x, weights)
    assert relative_error(y, expected) < 1e-4
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
        # A parameter that does not affect this sequence must have a gradient of 0.
        scale = np.linalg.norm(grad) * np.linalg.norm(along) / np.sqrt(along.size)
        assert abs((grad * along).sum() - expected_slope) <= 1e-4 * max(scale, abs(expected_slope)) + 1e-6, (
            jax.tree_util.keystr(path) if path else "x"
        )


@pytest.mark.parametrize(("name", "is_causal"), slow_unless(FIRST, NEW))
def test_law_3_bfloat16(name, is_causal):
    """Outputs in bfloat16 are within 2e-2 of the reference's norm. One case per mechanism, as its variants round
    alike."""
    net = network(name, is_causal)
    d = net.stack.dimensions
    oracle = oracle_of(mechanism_of(name))
    rounded = jax.tree.map(lambda a: np.asarray(a).astype(jnp.bfloat16), (net.variables["params"], net.x))
    half = dataclasses.replace(d, dtype=jnp.bfloat16)
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote bfloat16 implicitly
        rough = jax.jit(net.stack.clone(dimensions=half).apply)(net.variables, rounded[1])[0]
    assert rough.dtype == jnp.bfloat16
    # If rounding the operands alone moves the exact result further than that, twice as far is allowed.
    exact, of_rounded = (
        np.stack([oracle(params, net.mechanism, d, x) for x in xs])
        for params, xs in (as_float64((net.variables["params"], net.x)), as_float64(rounded))
    )
    assert relative_error(rough, exact) < max(2e-2, 2 * relative_error(of_rounded, exact))


# Ids of a row's two sequences, some at the ends of int32: any two different numbers separate sequences.
SEGMENT_IDS = (
    (1, 2),
    (-1, -2),
    (np.iinfo(np.int32).min, np.iinfo(np.int32).max),
    (0, np.iinfo(np.int32).min + 1),
)
CUT = 12


def packed(ids: tuple[int, int]) -> dict[str, jax.Array]:
    """The arguments for a row of two sequences, the first of CUT tokens."""
    place = np.arange(LENGTH)
    return {
        "segment_ids": jnp.asarray(np.where(place < CUT, *ids).astype(np.int32)[None]),
        "positions": jnp.asarray(np.where(place < CUT, place, place - CUT).astype(np.int32)[None]),
    }


@pytest.mark.parametrize("name", slow_unless(named(lambda m: m.packs and m.causal), NEW))
def test_law_4_packing(name):
    """Two sequences packed in one row have the same outputs and gradients as alone, whatever ids they have."""
    net = network(name, True)
    x = net.x[:1]
    weight = np.random.default_rng(0).standard_normal(x.shape).astype(np.float32)
    # Nothing after a sequence affects it (law 1), so both can be rows of the network's program.
    rows, weights = (
        np.concatenate(
            [
                np.pad(a[:, :CUT], ((0, 0), (0, LENGTH - CUT), (0, 0))),
                np.pad(a[:, CUT:], ((0, 0), (0, CUT), (0, 0))),
            ]
        )
        for a in (x, weight)
    )
    alone, (expected, _) = net.both(net.variables, rows, weights)

    def weighted(v, packing):
        y = net.stack.apply(v, x, **packing)[0]
        return jnp.sum(y * weight), y

    together = jax.jit(jax.grad(weighted, has_aux=True))
    for ids in SEGMENT_IDS:
        gradients, y = together(net.variables, packed(ids))
        assert relative_error(y[0], np.concatenate([alone[0, :CUT], alone[1, : LENGTH - CUT]])) < 1e-5
        for a, b in zip(*map(jax.tree.leaves, (gradients, expected)), strict=True):
            assert relative_error(a, b) < 1e-4
    # A sequence with the id of an earlier one does not continue it.
    sizes = (CUT, 5, LENGTH - CUT - 5)
    given = packed(SEGMENT_IDS[0])
    found = [
        together(net.variables, given | {"segment_ids": jnp.asarray(np.repeat(ids, sizes)[None], jnp.int32)})[
            1
        ]
        for ids in ([7, 3, 7], [0, 1, 2])
    ]
    np.testing.assert_array_equal(*found)


# The lengths of the sequences in two packed rows of an encoder. The second row ends in padding.
PACKED_LENGTHS = ((12, 1, 16), (5, 17))


def packed_rows() -> tuple[list[tuple[int, slice]], dict[str, jax.Array]]:
    """The positions of the sequences of PACKED_LENGTHS, (row, tokens), and the arguments that describe them."""
    places = [
        (row, slice(sum(sizes[:i]), sum(sizes[: i + 1])))
        for row, sizes in enumerate(PACKED_LENGTHS)
        for i in range(len(sizes))
    ]
    ids = np.full((2, LENGTH), 9, np.int32)
    for number, (row, tokens) in enumerate(places):
        ids[row, tokens] = (7, -3, 7, 5, 2)[number]  # the third repeats the id of the first
    lengths = np.array([sum(sizes) for sizes in PACKED_LENGTHS], np.int32)
    arrays = {"segment_ids": ids, "lengths": lengths}
    # As an encoder passes them: Performer's random features depend on positions, not only on distances.
    return places, {"positions": places_in_sequences(jnp.asarray(ids)), **jax.tree.map(jnp.asarray, arrays)}


PACKS_BIDIRECTIONAL = named(lambda m: m.packs_bidirectional)


@pytest.mark.parametrize("name", slow_unless(PACKS_BIDIRECTIONAL, NEW))
def test_law_4_packing_in_encoders(name):
    """Outputs and gradients of packed encoder rows, one of them padded, equal the float64 reference's for each sequence
    alone, and padding does not change a bit of them."""
    net = network(name, False)
    d, oracle = net.stack.dimensions, oracle_of(mechanism_of(name))
    places, packing = packed_rows()
    rng = np.random.default_rng(0)
    weight = rng.standard_normal(net.x.shape)
    weight[1, packing["lengths"][1] :] = 0.0

    def weighted(v, x, packing):
        y = net.stack.apply(v, x, **packing)[0]
        return jnp.sum(y * weight.astype(np.float32)), y

    together = jax.jit(jax.grad(weighted, argnums=(0, 1), has_aux=True))
    (gradient, gradient_x), y = together(net.variables, net.x, packing)
    params, xs = as_float64(net.variables["params"]), as_float64(net.x)
    for row, tokens in places:
        assert relative_error(y[row, tokens], oracle(params, net.mechanism, d, xs[row, tokens])) < 1e-4

    # All parameters, or all inputs, along a random direction.
    def slope(direction, x_direction):
        stepped = jax.tree.map(lambda leaf, along: leaf + 1e-30j * along, params, direction)
        x = xs + 1e-30j * x_direction
        return sum(
            np.imag((oracle(stepped, net.mechanism, d, x[at]) * weight[at]).sum()) / 1e-30 for at in places
        )

    zeros = jax.tree.map(np.zeros_like, params), np.zeros_like(xs)
    drawn = jax.tree.map(lambda leaf: rng.standard_normal(leaf.shape), params), rng.standard_normal(xs.shape)
    for actual, direction, expected in (
        (as_float64(gradient["params"]), drawn[0], slope(drawn[0], zeros[1])),
        (np.asarray(gradient_x, np.float64), drawn[1], slope(zeros[0], drawn[1])),
    ):
        pairs = list(zip(jax.tree.leaves(actual), jax.tree.leaves(direction), strict=True))
        scale = math.sqrt(sum((a**2).sum() for a, _ in pairs))
        assert abs(sum((a * b).sum() for a, b in pairs) - expected) <= 1e-4 * max(scale, abs(expected))

    poisoned = together(net.variables, changed(net.x, (1, slice(packing["lengths"][1], None)), 50.0), packing)
    (other, other_x), other_y = poisoned
    for row, tokens in places:
        np.testing.assert_array_equal(other_y[row, tokens], y[row, tokens])
    for a, b in zip(*map(jax.tree.leaves, ((other, other_x), (gradient, gradient_x))), strict=True):
        np.testing.assert_array_equal(a, b)
    # Without the ids, the sequences do see each other.
    one = {**packing, "segment_ids": jnp.zeros_like(packing["segment_ids"])}
    assert relative_error(together(net.variables, net.x, one)[1][0], y[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in PACKS_BIDIRECTIONAL if name in LEADING])
def test_law_4_packing_in_encoders_in_bfloat16(name):
    """Each sequence's outputs in bfloat16 are as close to the reference as law 3 allows for it alone."""
    net = network(name, False)
    d, oracle = net.stack.dimensions, oracle_of(mechanism_of(name))
    places, packing = packed_rows()
    rounded = jax.tree.map(lambda a: np.asarray(a).astype(jnp.bfloat16), (net.variables["params"], net.x))
    half = net.stack.clone(dimensions=dataclasses.replace(d, dtype=jnp.bfloat16))
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote bfloat16 implicitly
        rough = jax.jit(half.apply)(net.variables, rounded[1], **packing)[0]
    exact, of_rounded = (
        np.concatenate([oracle(params, net.mechanism, d, x[at]) for at in places])
        for params, x in (as_float64((net.variables["params"], net.x)), as_float64(rounded))
    )
    together = np.concatenate([np.asarray(rough[at], np.float64) for at in places])
    assert relative_error(together, exact) < max(2e-2, 2 * relative_error(of_rounded, exact))


# One case for each kernel that takes segments: windows, and any other pattern.
@pytest.mark.parametrize("name", slow_unless(["local-sliding", "local-dilated"], ("local-sliding",)))
def test_law_4_packing_in_kernels(name):
    """The kernels separate sequences as XLA does, whatever ids they have."""
    net = network(name, True)
    mechanism = dataclasses.replace(net.mechanism, window=8)  # no kernel takes smaller blocks
    d = net.stack.dimensions
    stacks = (
        Stack((mechanism,), dataclasses.replace(d, implementation=implementation))
        for implementation in ("xla", "pallas_interpret")
    )
    params = net.variables["params"]
    first = {**params, "layers_0": jax.tree.map(lambda leaf: leaf[:1], params["layers_0"])}
    xla, kernel = (
        jax.jit(
            lambda ids, s=s: s.apply({"params": first}, net.x[:1], **{**packed((0, 1)), "segment_ids": ids})[
                0
            ]
        )
        for s in stacks
    )
    for ids in SEGMENT_IDS:
        segments = packed(ids)["segment_ids"]
        assert relative_error(kernel(segments), xla(segments)) < 1e-5


REFUSING = [
    (name, is_causal)
    for name, is_causal in [*EACH, *OTHER]
    if not (CASES[name].packs if is_causal else CASES[name].packs_bidirectional)
]


@pytest.mark.parametrize(("name", "is_causal"), REFUSING, ids=form_id)
def test_law_4_packing_is_refused(name, is_causal):
    mechanism = CASES[name]
    stack = make_stack((mechanism,) * (LAYERS * mechanism.group), dimensions(is_causal))
    x, ids = jax.ShapeDtypeStruct((2, 5, 16), jnp.float32), jax.ShapeDtypeStruct((2, 5), jnp.int32)
    init = lambda x, ids: stack.init(jax.random.key(0), x, segment_ids=ids)  # noqa: E731
    with pytest.raises(ValueError, match=f"segment_ids: mechanism {mechanism.name} "):
        jax.eval_shape(init, x, ids)


@pytest.mark.parametrize("name", slow_unless(named(lambda m: m.bidirectional), NEW))
def test_law_4_padding(name):
    """Padding changes no output of the real tokens, and gets no gradient whatever it contains."""
    net = network(name, False)
    real = 17
    lengths = jnp.array([real, LENGTH], jnp.int32)

    def loss(v, x):
        y = net.stack.apply(v, x, lengths=lengths)[0]
        return jnp.sum(y[0, :real] ** 3), y

    grad = jax.jit(jax.grad(loss, has_aux=True))
    poisoned = changed(net.x, (0, slice(real, None)), 50.0)
    gradients, padded = grad(net.variables, net.x)
    poisoned_gradients, poisoned_padded = grad(net.variables, poisoned)
    # BigBird draws different random blocks for each number of blocks, so a longer row has a different pattern.
    if not name.endswith("bigbird"):
        assert relative_error(padded[0, :real], net.run(net.variables, net.x[:1, :real])[0]) < 1e-5
    assert relative_error(padded[1], net.run(net.variables, net.x)[1]) < 1e-5
    np.testing.assert_array_equal(poisoned_padded[0, :real], padded[0, :real])
    for a, b in zip(*map(jax.tree.leaves, (gradients, poisoned_gradients))):
        assert np.isfinite(np.asarray(b)).all()
        np.testing.assert_array_equal(a, b)


def training_step(name: str, n: int, **changes: Any) -> Any:
    """The gradient of one layer of realistic size with respect to its parameters, traced on n tokens."""
    d = dimensions(CASES[name].causal, **{"d_model": 32, "head_dim": 8, "d_ff": 32} | changes)
    stack = make_stack((default_size(name),) * CASES[name].group, d)
    token = jax.ShapeDtypeStruct((1, 1, 32), d.dtype)
    x = jax.ShapeDtypeStruct((1, n, 32), d.dtype)
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote bfloat16 implicitly
        variables = jax.eval_shape(lambda key, x: nn.unbox(stack.init(key, x)), jax.random.key(0), token)
        return jax.jit(jax.grad(lambda v, x: stack.apply(v, x)[0].sum())).trace(variables, x)


def largest(shapes: list[str], separator: str) -> int:
    """The number of elements of the largest array, from shapes written with this separator."""
    return max(math.prod(int(n) for n in shape.split(separator)) for shape in shapes)


LINEAR = [name for name in COMPILED if CASES[name].linear_cost]


@pytest.mark.parametrize("name", slow_unless(LINEAR, FAST_MEMORY))
def test_law_6_linear(name):
    """Doubling the length at most doubles (2.2) the temporary memory of forward and backward; nothing is n x n."""
    short, long = (training_step(name, n).lower().compile() for n in (2**14, 2**15))
    sizes = [c.memory_analysis().temp_size_in_bytes for c in (short, long)]
    assert sizes[1] <= 2.2 * sizes[0], sizes
    assert largest(re.findall(r"\w+\[([\d,]+)\]", short.as_text()), ",") < 2**28 / 4


def default_size(name):
    """The case with realistic windows, blocks and token counts."""
    sizes = {"window": 256, "num_compressed": 64, "block_size": 512, "history_size": 512, "num_global": 16}
    sizes |= {
        "num_projected": 256,
        "max_length": 2**15,
        "chunk_size": 128,
        "ranks": None,
        "block_sizes": None,
    }
    if type(CASES[name]) is MLRConfig:
        sizes["context"] = 2**15
    fields = {field.name for field in dataclasses.fields(CASES[name])}
    return dataclasses.replace(CASES[name], **{k: v for k, v in sizes.items() if k in fields})


@pytest.mark.parametrize(("name", "is_causal"), slow_unless(FIRST, FAST_ENGINES))
def test_law_7_composes(name, is_causal):
    """vmap and a single token (other laws cover jit, grad, scan, grouped heads and ragged lengths)."""
    net = network(name, is_causal)
    expected = net.run(net.variables, net.x)
    mapped = jax.jit(jax.vmap(lambda x: net.stack.apply(net.variables, x[None])[0][0]))(net.x)
    assert relative_error(mapped, expected) < 1e-5
    one = net.run(net.variables, net.x[:, :1])
    assert one.shape == (2, 1, 16)
    if is_causal:
        assert relative_error(one, expected[:, :1]) < 1e-5


@pytest.mark.parametrize("name", slow_unless(ENGINES, FAST_ENGINES))
def test_law_7_remat(name):
    """Checkpoints change no gradient."""
    net = network(name, CASES[name].causal)
    weight = np.random.default_rng(0).standard_normal(net.x.shape).astype(np.float32)
    arguments = (net.variables, net.x, weight)
    remat = jax.jit(both_of(net.stack.clone(remat="full")))
    for a, b in zip(*(jax.tree.leaves(both(*arguments)) for both in (net.both, remat)), strict=True):
        assert relative_error(a, b) < 1e-4


@pytest.mark.parametrize(
    "name", slow_unless(dict.fromkeys((*LEADING, *ENGINES)), (*FAST_ENGINES, "skyformer"))
)
def test_law_7_traces_in_64_bits(name):
    """A Python int becomes an int64, which users mix with int32 by JAX's usual rules; an array of a Python float
    becomes float64."""
    net = network(name, CASES[name].causal)
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        jax.eval_shape(jax.grad(lambda v: net.stack.apply(v, net.x)[0].sum()), net.variables)


@pytest.mark.parametrize("name", slow_unless(COMPILED, FAST_KERNELS))
def test_law_8_lowers_for_tpu(name):
    """A host without a TPU lowers training for one: with its kernels, in 32 bits, and with nothing of size n x n,
    whatever the mechanism's cost (compilation: tests/laws/test_tpu.py)."""
    n = 2**14
    text = (
        training_step(name, n, dtype=jnp.bfloat16, implementation=None, head_dim=64)
        .lower(lowering_platforms=("tpu",))
        .as_text()
    )
    found = set(re.findall(r'kernel_name = "(\w+)"', text))
    assert found == set(KERNELS.get(name, ()))
    assert ("@tpu_custom_call" in text) == bool(found)
    # An operation's attributes, such as the padding of a running sum, are 64-bit for any operands. (The word boundary
    # keeps the search linear: a table's hexadecimal digits form one word of a megabyte.)
    operands = re.sub(r"\b\w+ = dense<[^>]*> : tensor<[\dx]+xi64>", "", text)
    types = set(re.findall(r"tensor<(?:[\d?]+x)*([a-z]\w*)>", operands))
    assert {"bf16", "f32"} <= types <= {"bf16", "f32", "i1", "i8", "ui8", "i32", "ui32", "index"}
    # XLA adds up the differences of kernelized attention, whose last axis has the features, without writing them.
    shapes = [x for x in re.findall(r"tensor<(\d+(?:x\d+)*)x[a-z]", text) if not x.endswith(f"x256x{n}x64")]
    assert largest(shapes, "x") < n**2 / 2


# One configuration that equals full attention, and one that nearly does. The scale 1 / r of an MLR level against full
# attention's 1 / sqrt(head_dim) is here 1 / 4 and 1 / 2.
LEVELS = MLRConfig(context=16, ranks=(4,), qk_norm=False, score_scale=2.0)
FULL = {
    "window": (LocalConfig(window=LENGTH), LocalConfig(window=LENGTH - 1), 1e-4),
    "diagonal block": (DiagConfig(block_size=LENGTH), DiagConfig(block_size=LENGTH - 1), 1e-4),
    "hopfield step": (HopfieldConfig(steps=1), HopfieldConfig(steps=2), 1e-2),
    "mlr level": (LEVELS, dataclasses.replace(LEVELS, ranks=(2, 2)), 1e-2),
}


@pytest.mark.parametrize("case", FULL)
def test_law_5_one_is_full_attention(case):
    *configurations, apart = FULL[case]
    full = network("full", True)
    expected = full.run(full.variables, full.x)
    same, other = (
        jax.jit(Stack((mechanism,) * LAYERS, dimensions(True)).apply)(full.variables, full.x)[0]
        for mechanism in configurations
    )
    assert relative_error(same, expected) < 1e-5
    assert relative_error(other, expected) > apart


@pytest.mark.parametrize("memory", slow_unless(["output", "layer"], ["layer"]))
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
