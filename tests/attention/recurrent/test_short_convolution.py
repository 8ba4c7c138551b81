"""The short convolution against its sum token by token, in rows of several sequences and in pieces."""

import jax
import jax.numpy as jnp
import numpy as np

from brl_jax.attention.recurrent.short_convolution import short_convolution
from tests.support.numbers import as_float64, relative_error

SIZE, LENGTH = 4, 13
# The first id returns after one token with another id: that makes a third sequence.
IDS = np.asarray([[5] * 6 + [2] + [5] * 6, [1] * 2 + [2] * 9 + [3] * 2])


def arrays():
    rng = np.random.default_rng(0)
    shapes = ((2, LENGTH, 3, 2), (SIZE, 3, 2), (3, 2), (2, LENGTH, 3, 2))
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def convolved(x, kernel, bias, ids):
    y = np.zeros_like(x) + bias
    for row, t in np.ndindex(x.shape[:2]):
        for back in range(min(SIZE, t + 1)):
            if (ids[row, t - back : t + 1] == ids[row, t]).all():
                y[row, t] += kernel[SIZE - 1 - back] * x[row, t - back]
    return y


def test_outputs_and_gradients_equal_the_sum():
    x, kernel, bias, weight = arrays()

    def loss(x, kernel, bias, ids):
        y = short_convolution(x, kernel, bias, segment_ids=ids)[0]
        return jnp.sum(y * weight), y

    gradients, y = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))(x, kernel, bias, IDS)
    exact = as_float64((x, kernel, bias))
    assert relative_error(y, convolved(*exact, IDS)) < 1e-6
    # The sum is linear in each argument.
    for i, gradient in enumerate(gradients):
        step = np.random.default_rng(i).normal(size=exact[i].shape)
        moved = [a + step if i == j else a for j, a in enumerate(exact)]
        slope = ((convolved(*moved, IDS) - convolved(*exact, IDS)) * as_float64(weight)).sum()
        np.testing.assert_allclose((as_float64(gradient) * step).sum(), slope, rtol=1e-5)
    rough = short_convolution(*(a.astype(jnp.bfloat16) for a in (x, kernel, bias)), segment_ids=IDS)[0]
    assert rough.dtype == jnp.bfloat16
    assert relative_error(rough, convolved(*exact, IDS)) < 1e-2


def test_pieces_are_the_whole():
    """Bitwise, wherever pieces end: a prompt, single tokens, and pieces that end in padding."""
    x, kernel, bias, _ = arrays()
    step = jax.jit(
        lambda x, ids, recent, count: short_convolution(
            x, kernel, bias, segment_ids=ids, recent=recent, count=count
        )
    )
    for ids in (None, IDS):
        whole = jax.jit(short_convolution)(x, kernel, bias, segment_ids=ids)[0]
        recent, start = jnp.zeros((2, SIZE - 1, 3, 2), jnp.float32), 0
        for size, exist in ((5, 5), (1, 1), (3, 0), (3, 2), (1, 1), (4, 4)):
            part = np.nan * np.ones((2, size, 3, 2), np.float32)
            part[:, :exist] = x[:, start : start + exist]
            own = None
            if ids is not None:
                own = np.full((2, size), -7, np.int32)
                own[:, :exist] = ids[:, start : start + exist]
                # A piece continues the sequence before it or begins another.
                recent = jnp.where(
                    (own[:, 0] == ids[:, start - 1])[:, None, None, None] | (exist == 0), recent, 0
                )
            y, recent = step(part, own, recent, exist)
            np.testing.assert_array_equal(y[:, :exist], whole[:, start : start + exist])
            start += exist
    assert start == LENGTH
