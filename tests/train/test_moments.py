import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.engine.moments import add_gradient, fresh_moments, relative_deviations


def _gradients(steps):
    rng = np.random.default_rng(0)
    sizes = rng.uniform(0.1, 3.0, (steps, 2))
    return [
        {
            "a": jnp.asarray(size[0] * rng.standard_normal((3, 4)), jnp.float32),
            "b": {"c": jnp.asarray(size[1] * rng.standard_normal(5), jnp.float32)},
        }
        for size in sizes
    ]


def _moments(gradients):
    moments = fresh_moments(gradients[0])
    for gradient in gradients:
        moments = jax.jit(add_gradient)(moments, gradient)
    return moments


def test_deviations_of_the_norms():
    gradients = _gradients(50)
    tensors = np.array([[np.linalg.norm(x) for x in (g["a"], g["b"]["c"])] for g in gradients], np.float64)
    whole = np.sqrt((tensors**2).sum(1))
    got = relative_deviations(_moments(gradients))
    assert float(got["grad_rsd"]) == pytest.approx(whole.std() / whole.mean(), rel=1e-5)
    expected = (tensors.std(0) / tensors.mean(0)).mean()
    assert float(got["grad_rsd_tensors"]) == pytest.approx(expected, rel=1e-5)


def test_large_norms_that_hardly_differ():
    """In float32, subtracting the square of a sum from a sum of squares would lose the difference."""
    gradients = [{"a": jnp.float32(1e4 + size)} for size in (0.0, 1.0, 2.0, 3.0)]
    got = relative_deviations(_moments(gradients))
    assert float(got["grad_rsd"]) == pytest.approx(np.std([0, 1, 2, 3]) / 10001.5, rel=1e-3)


def test_gradients_that_are_always_zero():
    got = relative_deviations(_moments([{"a": jnp.zeros(3), "b": jnp.zeros(2)}] * 2))
    assert float(got["grad_rsd"]) == float(got["grad_rsd_tensors"]) == 0.0
