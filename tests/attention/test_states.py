"""init, extend and step of every mechanism with a state: a sequence in pieces gives the same as at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from brl_jax import state_functions
from tests.marks import slow_unless
from tests.support.states import CASES, H, K, N, T, projected

B = 2
WINDOW = {"local_window_size": (3, 0), "is_causal": True}


def _inputs(name, dtype=jnp.float32):
    rng, heads = np.random.default_rng(0), (N, N, N) if name == "flowformer" else (N, K, K)
    return [rng.standard_normal((B, T, n, H)).astype(dtype) for n in heads]


@pytest.mark.parametrize("name", slow_unless(CASES, ("local", "linear", "flash")))
def test_a_sequence_in_pieces_is_the_sequence(name):
    case = CASES[name]
    arrays = _inputs(name)
    expected = jax.jit(case.at_once)(*arrays)
    functions = case.functions(name)
    extend, step = jax.jit(functions.extend), jax.jit(functions.step)
    state = functions.init(B, arrays[1].shape[2], H)
    outs, start = [], 0
    for size in (5, 1, 1, 3, 1):
        part = [x[:, start : start + size] for x in arrays]
        out, new = (step if size == 1 else extend)(*part, state, **case.more(*part))
        assert jax.tree.structure(new) == jax.tree.structure(state)
        assert [x.shape for x in jax.tree.leaves(new)] == [x.shape for x in jax.tree.leaves(state)]
        outs, state, start = [*outs, out], new, start + size
    np.testing.assert_allclose(jnp.concatenate(outs, 1), expected, rtol=2e-4, atol=2e-5)
    with pytest.raises(ValueError, match="a step takes one token, got 11; extend takes any number"):
        functions.step(*arrays, state, **case.more(*arrays))


def test_a_first_state_can_be_donated():
    """A caller who gives each state up gives up the first one too, so it must not hold one array twice."""
    for name, case in CASES.items():
        state = case.functions(name).init(B, K, H)
        jax.block_until_ready(jax.jit(lambda state: state, donate_argnums=0)(state))


@pytest.mark.parametrize("name", slow_unless(CASES, ("local", "linear, decayed", "kda")))
def test_states_after_each_of_the_last_tokens(name):
    """A caller who keeps only some of the last tokens goes back to the state after them."""
    case = CASES[name]
    arrays = _inputs(name)
    functions = case.functions(name)
    extend = jax.jit(functions.extend, static_argnames="return_states")
    state = functions.init(B, arrays[1].shape[2], H)

    def call(start, end, state, **options):
        part = [x[:, start:end] for x in arrays]
        return extend(*part, state, **case.more(*part), **options)

    _, state = call(0, 2, state)
    expected = jax.jit(case.at_once)(*arrays)
    for last in (4, 6):
        out, states = call(2, 8, state, return_states=last)
        np.testing.assert_allclose(out, expected[:, 2:8], rtol=2e-4, atol=2e-5)
        for i in (0, 2, last - 1):
            back = jax.tree.map(lambda x, i=i: x[i], states)
            assert jax.tree.structure(back) == jax.tree.structure(state)
            for t in range(8 - last + i + 1, T):
                token, back = call(t, t + 1, back)
                np.testing.assert_allclose(token, expected[:, t : t + 1], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("name", ["local", "diag", "linear", "bsbr", "mlr"])
def test_values_narrower_than_keys(name):
    case = CASES[name]
    query, key, value = _inputs(name)
    functions = case.functions(name, value_dim=5)
    state, pieces = functions.init(B, K, H), []
    for start, end in ((0, 6), (6, 7), (7, T)):
        tokens = [x[:, start:end] for x in (query, key, value[..., :5])]
        out, state = jax.jit(functions.extend)(*tokens, state, **case.more(*tokens))
        pieces.append(out)
    expected = jax.jit(case.at_once)(query, key, value)[..., :5]
    np.testing.assert_allclose(jnp.concatenate(pieces, 1), expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize(
    ("name", "settings", "error", "message"),
    [
        ("lokal", {}, ValueError, "name must be one of local, diag, .*, got 'lokal'"),
        ("local", {"local_window_sise": 4}, TypeError, "did you mean 'local_window_size'?"),
        ("local", {}, TypeError, r"state_functions\('local'\) needs local_window_size"),
        ("norm", {"epsilon": -1.0}, ValueError, "epsilon must be at least 0, got -1.0"),
        ("linear", {"return_state": True}, TypeError, "got 'return_state'"),
        ("mamba2", {}, ValueError, "got 'mamba2'; use 'linear' with normalize=False, .* log_decay"),
    ],
)
def test_bad_settings(name, settings, error, message):
    with pytest.raises(error, match=message):
        state_functions(name, **settings)


LOCAL, LINEAR, LONG_SHORT = (
    state_functions(name, **settings)
    for name, settings in (
        ("local", {"local_window_size": (3, 0)}),
        ("linear", {}),
        ("long_short", {"length": T}),
    )
)


@pytest.mark.parametrize(
    ("functions", "rows", "options", "message"),
    [
        (LOCAL, 1, {}, r"state.key must be float32 of shape \(1, 4, 2, 8\), got float32 of shape"),
        (LOCAL, B, {"state": (1, 2, 3)}, "state must be of type LocalState, got"),
        (LINEAR, B, {"return_states": 12}, "return_states must be from 1 to the number of tokens 11, got 12"),
        (LINEAR, B, {"return_states": 2, "segment_ids": np.zeros((B, T), np.int32)},
         "segment_ids must be None with return_states"),
        (LONG_SHORT, B, {}, r"state.logits must be float32 of shape \(2, 16, 2, 3\), got float32 of .*\(2, 16, 2, 1\)"),
        (LONG_SHORT, B, {"state": ()}, "state must be of type LongShortState, got"),
    ],
)  # fmt: skip
def test_bad_states(functions, rows, options, message):
    tokens = [x[:rows] for x in _inputs("linear")]
    more = projected(*tokens) if functions is LONG_SHORT else {}
    with pytest.raises(ValueError, match=message):
        functions.extend(*tokens, **more, **{"state": functions.init(B, K, H)} | options)


def test_a_window_can_start_without_a_state():
    query, key, value = _inputs("local")
    expected = brl_jax.local_attention(query, key, value, **WINDOW)
    outs, state = [], None
    for part in (slice(0, 2), slice(2, 9), slice(9, T)):
        out, state = brl_jax.local_attention(
            *(x[:, part] for x in (query, key, value)), **WINDOW, state=state, return_state=True
        )
        outs.append(out)
    np.testing.assert_allclose(jnp.concatenate(outs, 1), expected, rtol=1e-5, atol=1e-6)
    for changes in (
        {"is_causal": False},
        {"local_window_size": None, "pattern": brl_jax.BlockDiagonal(4)},
        {"segment_ids": jnp.zeros((B, T), jnp.int32)},
        {"key_offset": 1},
        {"return_residual": True},
    ):
        with pytest.raises(ValueError, match="state and return_state must be given with is_causal=True"):
            brl_jax.local_attention(query, key, value, **WINDOW | changes, return_state=True)


@pytest.mark.parametrize("length", [1, 2])
def test_one_token_of_a_window_is_checked_as_several_are(length):
    query, key, value = (x[:, :length] for x in _inputs("local"))
    state = state_functions("local", local_window_size=(3, 0)).init(B, K, H)
    for changes, message in (
        ({"implementation": "palas"}, "implementation must be .*, got 'palas'"),
        ({"value": value[..., :4]}, r"state.value must be float32 of shape \(2, 4, 2, 4\)"),
        ({"value": value.astype(jnp.bfloat16)}, "value must have query's dtype float32, got bfloat16"),
    ):
        with pytest.raises(ValueError, match=message):
            brl_jax.local_attention(
                **{"query": query, "key": key, "value": value, "state": state} | WINDOW | changes
            )
    with pytest.raises(NotImplementedError, match="implementation='pallas' runs on the platform 'tpu' alone"):
        brl_jax.local_attention(query, key, value, **WINDOW, state=state, implementation="pallas")


def test_one_token_of_a_window_takes_the_kernel_that_it_asks_for():
    query, key, value = _inputs("local")
    state = state_functions("local", local_window_size=(3, 0)).init(B, K, H)
    outs = {"xla": [], "pallas_interpret": []}
    for implementation, out in outs.items():
        options = WINDOW | {"return_state": True, "implementation": implementation}
        step, own = jax.jit(functools.partial(brl_jax.local_attention, **options)), state
        for t in range(6):
            y, own = step(*(x[:, t : t + 1] for x in (query, key, value)), state=own)
            out.append(y)
    np.testing.assert_allclose(*(jnp.concatenate(out, 1) for out in outs.values()), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", slow_unless(CASES, ("linear",)))
def test_steps_under_scan_have_the_gradients_of_the_sequence(name):
    """One compiled step is enough; the gradient through the states equals the whole sequence's."""
    case = CASES[name]
    arrays = _inputs(name)
    functions = case.functions(name)

    def in_steps(arrays):
        def one(state, tokens):
            out, state = functions.step(*tokens, state, **jax.lax.stop_gradient(case.more(*tokens)))
            return state, out[:, 0]

        each = [jnp.moveaxis(x, 1, 0)[:, :, None] for x in arrays]
        outs = jax.lax.scan(one, functions.init(B, arrays[1].shape[2], H), each)[1]
        return jnp.moveaxis(outs, 0, 1)

    weights = jax.random.normal(jax.random.key(5), (B, T, N, H))
    ours = jax.jit(jax.grad(lambda a: jnp.sum(in_steps(a) * weights)))(arrays)
    theirs = jax.jit(jax.grad(lambda a: jnp.sum(case.at_once(*a) * weights)))(arrays)
    for x, y in zip(ours, theirs):
        np.testing.assert_allclose(x, y, rtol=2e-3, atol=2e-3 * float(jnp.abs(y).max()))
