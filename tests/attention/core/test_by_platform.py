"""Calls with one form per platform: what gets traced, exported and differentiated."""

import collections
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import brl_jax
from brl_jax.attention.core.by_platform import (
    Form,
    branches,
    by_platform,
    platform_jaxpr,
    recomputed,
    traced_for,
)
from train.engine.flops import matrix_flops


def squares(traced):
    """x^2 with a form for CPUs and one for others, each of which notes when it is traced; the gradient keeps 2x."""

    def choose(platform, x):
        factor = 1.0 if platform == "cpu" else 3.0

        def run(x):
            traced.append((platform, "run"))
            return factor * x**2, 2 * x

        def gradient(operands, result, kept, d_result):
            traced.append((platform, "gradient"))
            return (factor * kept * d_result,)

        return Form(run, gradient)

    def call(x):
        return by_platform(choose, x, results=x, kept=x, plain=lambda x: x**2)

    return call


def test_only_the_platform_that_is_lowered_for_is_traced():
    traced = []
    call = squares(traced)
    step = jax.jit(jax.grad(lambda x: call(x).sum())).trace(jnp.arange(3.0))
    assert not traced
    for platform in ("cpu", "tpu"):
        step.lower(lowering_platforms=(platform,))
        assert set(traced) <= {(platform, "run"), (platform, "gradient")}
        assert (platform, "gradient") in traced
        traced.clear()
    np.testing.assert_array_equal(step.lower().compile()(jnp.arange(3.0)), 2 * np.arange(3.0))


@pytest.mark.parametrize(
    "wrap", [lambda f: f, jax.checkpoint, jax.vmap, lambda f: jax.vmap(jax.checkpoint(f))]
)
def test_derivatives(wrap):
    call = wrap(squares([]))
    x = jnp.asarray([1.0, 2.0, -3.0])
    total = lambda x: call(x).sum()  # noqa: E731
    np.testing.assert_allclose(jax.grad(total)(x), 2 * x)
    np.testing.assert_allclose(jax.jvp(total, (x,), (jnp.ones_like(x),))[1], (2 * x).sum())
    np.testing.assert_allclose(jax.hessian(total)(x), 2 * np.eye(3), atol=1e-6)
    np.testing.assert_allclose(jax.vmap(jax.grad(total))(jnp.stack([x, 2 * x])), [2 * x, 4 * x])


def test_runs_without_jit():
    """A primitive is compiled even under jax.disable_jit, which people use to debug."""
    call = squares([])
    x = jnp.asarray([1.0, 2.0, -3.0])
    with jax.disable_jit():
        np.testing.assert_array_equal(call(x), x**2)
        np.testing.assert_allclose(jax.grad(lambda x: call(x).sum())(x), 2 * x)


_TRACED: list[str] = []


def scaled(factor):
    def run(x):
        _TRACED.append(str(factor))
        return factor * x, ()

    return lambda x: by_platform(lambda *_: Form(run), x, results=x, plain=lambda x: factor * x)


def test_outside_jit_calls_that_close_over_the_same_are_traced_once():
    x = jnp.arange(3.0)
    factors = [2.0, 3.0, 2, np.full(3, 2.0), np.full(3, 5.0)]
    for factor in (*factors, 2.0, 3.0):
        np.testing.assert_array_equal(scaled(factor)(x), factor * x)
        out, pull = jax.vjp(scaled(factor), x)
        np.testing.assert_array_equal(pull(out)[0], factor * out)
    # For the call, and for the two programs of its gradient.
    assert collections.Counter(_TRACED) == dict.fromkeys(map(str, factors), 3)


def test_a_scan_keeps_what_the_gradient_needs():
    call = squares([])

    def total(x):
        return jax.lax.scan(lambda carry, x: (carry + call(x).sum(), None), 0.0, x)[0]

    x = jnp.arange(6.0).reshape(2, 3)
    np.testing.assert_allclose(jax.jit(jax.grad(total))(x), 2 * x)


def test_settings_of_the_call_hold_when_it_is_lowered():
    """Products use the precision in force at the call, not at compilation."""

    def product(x):
        return by_platform(lambda *_: Form(lambda x: (x @ x, ())), x, results=x, plain=lambda x: x @ x)

    x = jnp.ones((4, 4))

    def precise(x):
        with jax.default_matmul_precision("highest"):
            return product(x)

    assert "HIGHEST" in jax.jit(precise).lower(x).as_text()
    assert "HIGHEST" not in jax.jit(product).lower(x).as_text()


def test_branches_inside_a_form():
    """Inside a form only one branch is traced; elsewhere all are, and lowering picks one."""
    call = lambda x: branches(x, cuda=lambda x: x + 1, default=lambda x: x)  # noqa: E731
    assert "cond" in str(jax.make_jaxpr(call)(1.0)) or "platform_index" in str(jax.make_jaxpr(call)(1.0))
    with traced_for("cuda"):
        assert float(call(1.0)) == 2
    with traced_for("tpu"):
        assert float(call(1.0)) == 1


def test_the_operations_of_a_call_can_be_counted():
    (equation,) = jax.make_jaxpr(squares([]))(jnp.ones(3)).eqns
    on_tpu = str(platform_jaxpr(equation, "tpu"))
    assert "3.0" in on_tpu
    assert "3.0" not in str(platform_jaxpr(equation, "cpu"))
    (other,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    assert platform_jaxpr(other, "cpu") is None


@pytest.mark.parametrize("check_vma", [True, False])
def test_the_operations_of_a_call_on_a_mesh_can_be_counted(check_vma):
    """One call is a kernel whose `run` is differentiated, the other a form that sums over devices."""
    mesh = jax.sharding.AbstractMesh((4,), ("device",), axis_types=(jax.sharding.AxisType.Auto,))
    tokens, history = jnp.ones((1, 8, 2, 64)), jnp.ones((1, 512, 2, 64))

    def both(query, key, value, axis_name=None):
        read = brl_jax.compress(query, key, None, value, gamma=None, axis_name=axis_name)
        return brl_jax.propagate(key, read, read, strength=0.5)

    def on_mesh(*arrays):
        divided, whole = jax.P(None, "device"), jax.P()
        mapped = jax.shard_map(
            functools.partial(both, axis_name="device"),
            in_specs=(whole, divided, divided), out_specs=divided, check_vma=check_vma,
        )  # fmt: skip
        return mapped(*arrays)

    def flops(function):
        with jax.sharding.use_abstract_mesh(mesh):
            traced = jax.make_jaxpr(jax.grad(lambda *x: function(*x).sum(), (0, 1, 2)))
            return [matrix_flops(traced(tokens, history, history), kind) for kind in ("cpu", "tpu")]

    # Shorter arrays are padded more, and a form that sums over devices recomputes less.
    np.testing.assert_allclose(flops(on_mesh), flops(both), rtol=0.15)


QUERY = jax.ShapeDtypeStruct((1, 256, 2, 64), jnp.float32)
FEW = jax.ShapeDtypeStruct((1, 16, 2, 64), jnp.float32)


def windowed(query, key, value):
    return brl_jax.local_attention(query, key, value, local_window_size=(63, 0))


@pytest.mark.parametrize("platforms", [("cpu", "tpu"), ("tpu", "cuda")])
@pytest.mark.parametrize(
    ("function", "shapes"),
    [
        (windowed, (QUERY,) * 3),
        (jax.grad(lambda *x: windowed(*x).sum(), (0, 1, 2)), (QUERY,) * 3),
        (lambda q, k, c, v: brl_jax.compress(q, k, c, v, gamma=0.3), (FEW, QUERY, QUERY, QUERY)),
    ],
)
def test_export_for_several_platforms(function, shapes, platforms):
    exported = export.export(jax.jit(function), platforms=platforms)(*shapes)
    assert "tpu_custom_call" in exported.mlir_module()
    if "cpu" in platforms:
        random = np.random.default_rng(0)
        arrays = [jnp.asarray(random.normal(size=x.shape), x.dtype) for x in shapes]
        for got, want in zip(jax.tree.leaves(exported.call(*arrays)), jax.tree.leaves(function(*arrays))):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


def test_a_recomputed_loop_keeps_no_results_whatever_an_outer_policy_says():
    x = jnp.arange(1.0, 65.0) / 64

    def rows(row, x):
        table = jnp.sin(row * x)
        return jnp.vdot(table, table), table.argmax()

    def total(function, x):
        sums, places = jax.lax.map(lambda row: function(row, x), x)
        return sums.sum(), places

    def pulled(function):
        outer = jax.checkpoint(
            functools.partial(total, function), policy=jax.checkpoint_policies.everything_saveable
        )
        (_, places), pull = jax.vjp(outer, x)
        largest = max(leaf.size for leaf in jax.tree.leaves(pull))
        return largest, places, pull((1.0, np.zeros(places.shape, jax.dtypes.float0)))[0]

    kept, places, gradient = pulled(functools.partial(recomputed, rows))
    assert kept <= x.size
    all_kept, expected_places, expected = pulled(jax.checkpoint(rows))
    assert all_kept >= x.size**2
    np.testing.assert_array_equal(places, expected_places)
    np.testing.assert_allclose(gradient, expected, rtol=1e-6)
    hessian, expected = (
        jax.hessian(lambda x, function=function: total(function, x)[0])(x)
        for function in (functools.partial(recomputed, rows), rows)
    )
    np.testing.assert_allclose(hessian, expected, rtol=1e-4, atol=1e-4)
