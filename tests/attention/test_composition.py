"""What JAX's transformations ask of every attention function: derivatives of any order, symbolic batches, meshes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import brl_jax
from brl_jax import full_attention
from brl_jax.attention.core import by_platform
from tests.marks import slow_unless
from tests.support.calls import CALLS
from tests.support.meshes import check_equal

# The fast tests take one function with a custom gradient and one that uses only kernels.
_QUICK = ("local_both_sides", "propagate")
# The functions whose calls take a TPU's kernel, at lengths that are worth it.
_KERNELS = ("full", "local", "local_alibi", "compress", "propagate", "hopfield")
# NormAttention normalises over the values' features, Sliceformer orders each differently, and Long-Short has one norm
# for keys and values.
_NOT_BY_FEATURE = ("norm", "sliceformer", "long_short")
_EACH = [pytest.param(name, marks=() if name in _QUICK else pytest.mark.slow) for name in CALLS]


def test_every_function_is_called():
    """A new public function needs a call here, unless its arguments are not batches of sequences."""
    functions = {name for name in brl_jax.__all__ if name.endswith(("_attention", "_rule", "_rule_2"))}
    covered = (
        {f"{name}_attention" for name in CALLS} | {f"{name}_rule" for name in CALLS} | {"gated_delta_rule_2"}
    )
    assert functions <= covered


@pytest.mark.parametrize("name", [each for each in _EACH if each.values[0] not in _NOT_BY_FEATURE])
@pytest.mark.parametrize("features", [(2, 0, 1), (0, 1, 2, 3, 3, 1)], ids=("narrower", "wider"))
def test_values_of_any_width(name, features):
    """Each feature of an output depends on the same feature of the values and on no other."""
    make, call = CALLS[name]
    arrays = make(1)
    place = {"bilinear_mlr": 1, "bilinear_btt": 1}.get(name, 2 if len(arrays) > 2 else 0)
    chosen = jnp.asarray(features)

    def before(*arrays):
        return call(*arrays[:place], arrays[place][..., chosen], *arrays[place + 1 :])

    def after(*arrays):
        return call(*arrays)[..., chosen]

    @jax.jit
    def both(arrays):
        def one(function):
            out, pull = jax.vjp(function, *arrays)
            return out, *pull(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

        return one(before), one(after)

    for found, expected in zip(*both(arrays), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("name", _EACH)
def test_derivatives_of_any_order(name):
    """Forward mode agrees with reverse mode, and reverse over reverse with forward over reverse."""
    make, call = CALLS[name]
    arrays = make(1)
    places = tuple(range(len(arrays)))
    random = np.random.default_rng(0)
    changes = tuple(jnp.asarray(random.normal(size=x.shape), x.dtype) for x in arrays)

    def along(gradients):
        return sum(jnp.vdot(g, change) for g, change in zip(gradients, changes))

    def size(*arrays):
        gradients = jax.grad(lambda *a: jnp.square(call(*a)).sum(), places)(*arrays)
        return along(gradients)

    @jax.jit
    def all_modes(arrays):
        out, tangent = jax.jvp(call, arrays, changes)
        backward = along(jax.grad(lambda *a: jnp.vdot(call(*a), out), places)(*arrays))
        twice = along(jax.grad(size, places)(*arrays))
        forward_over_reverse = jax.jvp(size, arrays, changes)[1]
        # The second derivative of |out|^2 is 2 |tangent|^2 + 2 out . (second tangent), by forward mode alone.
        second = jax.jvp(lambda *a: jax.jvp(call, a, changes)[1], arrays, changes)[1]
        forward_twice = 2 * (jnp.vdot(tangent, tangent) + jnp.vdot(out, second))
        return jnp.vdot(out, tangent), backward, twice, forward_over_reverse, forward_twice

    forward, backward, *second = all_modes(arrays)
    np.testing.assert_allclose(forward, backward, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(second[0], second[1], rtol=2e-3, atol=1e-2)
    np.testing.assert_allclose(second[0], second[2], rtol=2e-3, atol=1e-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CALLS)
def test_no_array_outlives_its_call(name):
    """JAX's caches keep the functions that a call makes, and with them what these close over."""
    make, call = CALLS[name]
    with jax.checking_leaks():
        jax.jit(jax.grad(lambda *arrays: jnp.square(call(*arrays)).sum())).lower(*make(1))


@pytest.mark.parametrize("name", _EACH)
def test_a_symbolic_batch(name):
    make, call = CALLS[name]
    (batch,) = export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in make(1)]
    exported = export.export(jax.jit(call))(*shapes)
    for size in (1, 3):
        arrays = make(size)
        np.testing.assert_allclose(exported.call(*arrays), jax.jit(call)(*arrays), rtol=1e-4, atol=1e-5)


def test_only_the_batch_is_symbolic():
    (length,) = export.symbolic_shape("length")
    shapes = [jax.ShapeDtypeStruct((1, length, *x.shape[2:]), x.dtype) for x in CALLS["local"][0](1)]
    with pytest.raises(ValueError, match="only the batch, the first axis"):
        export.export(jax.jit(CALLS["local"][1]))(*shapes)


@pytest.mark.xdist_group("devices")
@pytest.mark.parametrize("name", _EACH)
def test_an_explicit_mesh(name, devices):
    worst, spec = devices.ask("tests.attention.on_meshes", f"explicit {name}")
    assert worst < 1e-4
    heads = 3 if name == "compress_blocks" else 2  # its outputs are (B, C, M, N, H)
    assert (spec[0], spec[heads]) == ("batch", "heads")
    assert not any(spec[1:heads])


@pytest.mark.xdist_group("devices")
@pytest.mark.parametrize("divided", ["heads", "tokens"])
@pytest.mark.parametrize("name", _EACH)
def test_an_automatic_mesh_divides_rows_and_heads_or_tokens(name, divided, devices):
    worst, spec = devices.ask("tests.attention.on_meshes", f"{divided} {name}")
    assert worst < 1e-4
    assert spec[0] == "data"


@pytest.mark.xdist_group("devices")
@pytest.mark.parametrize("divided", ["heads", "tokens"])
def test_a_convolution_has_its_gradient_on_a_mesh(divided, devices):
    """XLA's partitioner would count the kernel's gradient once for each device that shares a part of the values."""
    check_equal(*devices.ask("tests.attention.on_meshes", f"convolved {divided}"))


@pytest.mark.slow
@pytest.mark.xdist_group("devices")
@pytest.mark.parametrize("name", _KERNELS)
def test_kernels_are_divided(name, devices):
    assert devices.ask("tests.attention.on_meshes", f"kernels {name}")


@pytest.mark.parametrize(
    "name", slow_unless(["diag", "mlr", "long_short", "linear", "gated_delta", "gau"], ("diag", "linear"))
)
def test_gradients_outside_jit_are_traced_once(name, monkeypatch):
    make, call = CALLS[name]
    gradient = jax.grad(lambda *arrays: jnp.square(call(*arrays)).sum())
    arrays = make(1)
    gradient(*arrays)
    traced = []
    monkeypatch.setattr(by_platform._Function, "gradient", lambda *_: traced.append(name))
    gradient(*arrays)
    assert not traced


def test_a_symbolic_batch_on_an_explicit_mesh():
    """Exporting works. JAX cannot yet call such an export of any function: it fails to refine the shapes."""
    (batch,) = export.symbolic_shape("batch")
    mesh = jax.make_mesh((1,), ("heads",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:1])
    tokens, everywhere = NamedSharding(mesh, P(None, None, "heads")), NamedSharding(mesh, P())
    call = lambda x, bias, lengths: full_attention(x, x, x, bias, key_value_seq_lengths=lengths)  # noqa: E731
    with jax.set_mesh(mesh):
        exported = export.export(jax.jit(call))(
            jax.ShapeDtypeStruct((batch, 8, 2, 4), jnp.float32, sharding=tokens),
            jax.ShapeDtypeStruct((1, 2, 8, 8), jnp.float32, sharding=everywhere),
            jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=everywhere),
        )
    assert exported.out_avals[0].shape == (batch, 8, 2, 4)


def test_a_missing_argument_on_an_explicit_mesh():
    mesh = jax.make_mesh((1,), ("batch",), axis_types=(AxisType.Explicit,))
    query = jax.device_put(jnp.ones((2, 4, 2, 8)), NamedSharding(mesh, P("batch")))
    with jax.set_mesh(mesh), pytest.raises(TypeError, match="missing a required argument: 'key'"):
        brl_jax.linear_attention(query)
