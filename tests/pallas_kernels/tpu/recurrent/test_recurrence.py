"""The recurrence's kernels, interpreted on a CPU, against the recurrence token by token in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from brl_jax.attention.recurrent.delta import DeltaState
from brl_jax.attention.recurrent.linear import LinearState
from pallas_kernels import tpu
from tests.marks import slow_unless
from tests.oracles import kernels as oracle

# Logarithms of a token's decay; mixed entries alternate a weak decay with one that empties the state.
MIXED = [0.0, -1e3, -1e-3, -0.5, -90.0, -1e-2]
DECAYS = {"none": None, "weak": [-1e-3], "strong": [-20.0], "mixed": MIXED}
# For each feature its own; the numbers run over tokens and features.
BY_FEATURE = {
    "features weak": [-1e-3, 0.0, -2e-2, -0.1, -1e-5],
    "features strong": [-20.0, -60.0, -5.0],
    "features mixed": [*MIXED, -np.inf, -0.1, 0.0, -2e-2, -3.0],
}
DECAYS |= BY_FEATURE
TOLERANCES = {"float32": 1e-5, "bfloat16": 2e-2}


def function(delta, decay):
    """The public function that uses the tested kernel, of query, key, value, state, beta and log_decay."""

    def run(query, key, value, state, beta, log_decay, **options):
        options |= {"return_state": True, "implementation": "pallas_interpret"}
        if delta:
            options |= {"normalize_keys": False, "state": DeltaState(state)}
            if decay != "none":
                rule = brl_jax.kimi_delta_rule if decay in BY_FEATURE else brl_jax.gated_delta_rule
                return rule(query, key, value, beta=beta, log_decay=log_decay, **options)
            return brl_jax.delta_rule(query, key, value, beta=beta, **options)
        options |= {"normalize": False, "feature_map": "identity", "is_causal": True}
        options["state"] = LinearState(state, None)
        return brl_jax.linear_attention(query, key, value, log_decay=log_decay, **options)

    return run


def check(length, heads, sizes, delta, decay, dtype, packed):
    rng = np.random.default_rng(length)
    features, value_dim = sizes
    shapes = [
        (2, length, heads[0], features),
        (2, length, heads[1], features),
        (2, length, heads[1], value_dim),
    ]
    arrays = [rng.standard_normal(shape) for shape in shapes]
    arrays[1] /= np.linalg.norm(arrays[1], axis=-1, keepdims=True)
    arrays.append(rng.standard_normal((2, heads[1], features, value_dim)))
    arrays.append(rng.random((2, length, heads[1])) if delta else None)
    table = DECAYS[decay]
    if decay in BY_FEATURE:
        arrays.append(np.resize(table, arrays[1].shape))
    else:
        logs = None if table is None else np.resize(table, length)[None, :, None] + np.zeros((2, 1, heads[1]))
        arrays.append(logs)
    segments, options = None, {}
    if packed:
        ids = np.sort(rng.integers(0, 4, (2, length)), axis=1)
        ids[0] = np.arange(length) >= 128  # starts with a chunk
        lengths = np.asarray([length, length - length // 3])
        options = {"segment_ids": jnp.asarray(ids), "key_value_seq_lengths": jnp.asarray(lengths)}
        new = np.concatenate([np.zeros((2, 1)), ids[:, 1:] != ids[:, :-1]], axis=1)
        segments = np.where(np.arange(length) < lengths[:, None], np.cumsum(new, axis=1), -1)
    given = [None if x is None else jnp.asarray(x, jnp.float32) for x in arrays]
    given[:3] = [x.astype(dtype) for x in given[:3]]
    weights = [rng.standard_normal(shape) for shape in ((2, length, heads[0], value_dim), arrays[3].shape)]
    if packed:
        weights[0][segments < 0] = 0  # outputs in padding are meaningless
    moving = [i for i, x in enumerate(given) if x is not None]

    @jax.jit
    def run(*moved):
        def loss(*moved):
            every = list(given)
            for i, x in zip(moving, moved):
                every[i] = x
            out, state = function(delta, decay)(*every, **options)
            totals = (jnp.sum(a.astype(jnp.float32) * w) for a, w in zip((out, state[0]), weights))
            return sum(totals), (out, state[0])

        return jax.grad(loss, argnums=range(len(moving)), has_aux=True)(*moved)

    gradients, (out, last) = run(*(given[i] for i in moving))
    if packed:
        out = jnp.where((segments < 0)[..., None, None], 0, out)
    # The reference uses the kernel's rounded inputs, so only the kernel's rounding counts.
    names = ("query", "key", "value", "key_value", "beta", "log_decay")
    operands = {name: x if x is None else x.astype(jnp.float32) for name, x in zip(names, given)}
    cotangents = dict(zip(("total", "key_value"), weights))
    results, slopes = oracle.recurrence(operands | {"segments": segments}, cotangents)
    wanted = results["total"], results["key_value"], *(slopes[names[i]] for i in moving)
    for number, (got, want) in enumerate(zip((out, last, *gradients), wanted, strict=True)):
        got = np.asarray(got, np.float64)
        assert np.linalg.norm(got - want) <= TOLERANCES[dtype] * np.linalg.norm(want) + 1e-6, number


SIZES = {700: ((4, 2), (24, 40)), 130: ((1, 1), (128, 64)), 1: ((2, 1), (3, 5))}
CASES = [
    (length, delta, decay, dtype, packed)
    for length in SIZES
    for delta in (False, True)
    for decay in DECAYS
    for dtype, packed in (("float32", length > 1), ("bfloat16", False))
]
FAST = [(130, True, "mixed", "float32", True), (130, True, "features mixed", "float32", True)]


@pytest.mark.parametrize(("length", "delta", "decay", "dtype", "packed"), slow_unless(CASES, FAST))
def test_outputs_states_and_gradients_equal_the_recurrence(length, delta, decay, dtype, packed):
    check(length, *SIZES[length], delta, decay, dtype, packed)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["linear", "rotary", "norm", "cosformer"])
def test_features_and_sums_of_weights(name):
    """With the kernel, the surrounding code gives the same as with XLA's walk, packed and with a state."""
    rng = np.random.default_rng(0)
    query, key, value = (
        jnp.asarray(rng.standard_normal((2, 300, heads, 24)), jnp.float32) for heads in (4, 2, 2)
    )
    ids = jnp.asarray(np.sort(rng.integers(0, 4, (2, 300)), axis=1))
    options = {"is_causal": True, "return_state": True, "segment_ids": ids}
    call = {"norm": brl_jax.norm_attention, "cosformer": brl_jax.cosformer_attention}.get(
        name, brl_jax.linear_attention
    )
    if name == "rotary":
        options["positions"] = jnp.arange(300)[None]
    if name == "cosformer":
        options |= {"max_length": 300}

    def both(implementation):
        def loss(*arrays):
            out = call(*arrays, implementation=implementation, **options)
            floats = [x for x in jax.tree.leaves(out) if jnp.issubdtype(x.dtype, jnp.floating)]
            return sum(jnp.sum(jnp.sin(x)) for x in floats), floats

        return jax.tree.leaves(jax.jit(jax.grad(loss, argnums=range(3), has_aux=True))(query, key, value))

    for got, want in zip(both("pallas_interpret"), both("xla"), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * float(jnp.abs(want).max()))


@pytest.mark.slow
def test_poisoned_memory_and_any_order(hostile):
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.standard_normal((2, 300, 2, 16)), jnp.float32)
    numbers = jnp.asarray(rng.random((2, 300, 2)), jnp.float32)
    factors = tpu.Factors(numbers, numbers, -numbers, numbers, numbers[:, :3])
    state = jnp.zeros((2, 2, 16, 16))

    def run(interpret):
        def loss(x, factors):
            return jnp.sum(jnp.sin(tpu.recurrence(x, x, x, state, None, factors, interpret=interpret).total))

        return jax.tree.leaves(jax.grad(loss, argnums=(0, 1))(x, factors))

    for a, b in zip(run(hostile), run(True)):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_causal_to_the_bit():
    """Later tokens change nothing before them, in the same chunk and in later ones."""
    rng = np.random.default_rng(0)
    x, y = (jnp.asarray(rng.standard_normal((1, 300, 2, 16)), jnp.float32) for _ in range(2))
    beta = jnp.full((1, 300, 2), 0.5)
    run = jax.jit(functools.partial(brl_jax.delta_rule, implementation="pallas_interpret"))
    for cut in (40, 128, 200):
        other = jnp.where((jnp.arange(300) < cut)[None, :, None, None], x, y)
        np.testing.assert_array_equal(
            run(x, x, x, beta=beta)[:, :cut], run(other, other, other, beta=beta)[:, :cut]
        )


@pytest.mark.parametrize(
    ("shape", "dtype", "words"),
    slow_unless(
        [
            ((1, 8, 2, 300), jnp.float32, "up to 256 features of a head, got query with 300"),
            ((1, 8, 2, 16), jnp.float16, "float32 or bfloat16, got query of float16"),
        ],
        [((1, 8, 2, 16), jnp.float16, "float32 or bfloat16, got query of float16")],
    ),
)
def test_what_the_kernel_refuses(shape, dtype, words):
    x = jax.ShapeDtypeStruct(shape, dtype)
    assert words in tpu.recurrence_unsupported(x, x, x)
    with pytest.raises(NotImplementedError, match=words):
        jax.eval_shape(lambda x: tpu.recurrence(x, x, x, None, None, tpu.Factors()), x)


def test_wide_heads_with_decay_by_feature_need_more_than_16_mib():
    x = jax.ShapeDtypeStruct((1, 4096, 2, 256), jnp.float32)
    options = {"delta": True, "by_feature": True}
    assert "VMEM" in tpu.recurrence_unsupported(x, x, x, **options, chip="v4")
    assert tpu.recurrence_unsupported(x, x, x, **options, chip="v5e") is None
