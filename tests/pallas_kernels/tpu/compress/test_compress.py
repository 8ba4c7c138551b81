"""The compression kernels with and without biases and masks, interpreted on a CPU, against a float64 reference."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.tpu import compress, compress_blocks
from pallas_kernels.tpu.compress.backward import GradientStep
from pallas_kernels.tpu.compress.history import HistoryStep
from tests.marks import slow_unless
from tests.oracles import kernels as oracle
from tests.pallas_kernels.tpu.inputs import arrays
from tests.support.attention import pulled


def with_gradients(function, g, *operands):
    """The output, and the gradients of the operands that are not None."""
    return [x for x in pulled(function, g, *operands) if x is not None]


def check(
    shape,
    queries,
    bias=None,
    mask=None,
    *,
    lengths=None,
    dtype=jnp.float32,
    score="softmax",
    contrast=True,
    scale=0.3,
    spread=0.0,
    **options,
):
    """Compares with the reference; `bias` and `mask` are shapes, each axis of which may be 1."""
    batch, length, heads, head_dim = shape
    sizes = (queries, length, length, length, queries)
    q, k1, k2, v, g = arrays(0, dtype, *[(batch, n, heads, head_dim) for n in sizes], spread=spread)
    (gamma,) = arrays(1, jnp.float32, (heads,))
    rng = np.random.default_rng(2)
    added = None if bias is None else rng.standard_normal(bias).astype(np.float32)
    seen, given = np.ones((1, 1, 1, length), bool), (k1, k2, v)
    if mask is not None:
        seen = rng.random(mask) < 0.6
        seen[:, :, :, :3] = False
        # A key that some query sees must be finite; others may hold anything, but the kernel gets zeros.
        there = np.broadcast_to(seen.any((1, 2)), (batch, length))[:, :, None, None]
        given = k1, k2, v = [jnp.where(jnp.asarray(there), x, 0) for x in (k1, k2, v)]
        options["mask"] = jnp.asarray(seen)
    if lengths is not None:
        there = np.arange(length)[None] < np.asarray(lengths)[:, None]
        seen, options["key_lengths"] = there[:, None, None], jnp.asarray(lengths, jnp.int32)
        given = [jnp.where(there[:, :, None, None], x, jnp.nan) for x in given]
    if not contrast:
        k2, gamma, given = None, None, (given[0], None, given[2])

    def function(q, k1, k2, v, gamma, added):
        given = {"scale": scale, "score": score, "interpret": True} | options
        return compress(q, k1, k2, v, gamma=gamma, bias=added, **given)

    got = with_gradients(function, g, q, *given, gamma, None if added is None else jnp.asarray(added))
    wanted = 1 / (queries * head_dim**0.5) if scale is None else scale
    want = oracle.compress(q, k1, k2, v, gamma, wanted, score, g, seen, bias=added)
    oracle.check(got, want, 1e-5 if dtype == jnp.float32 else 1e-2)


SCORES = ("softmax", "relu2", "laplace")
with_lengths = functools.partial(
    check, (2, 300, 1, 64), 5, lengths=[0, 201], scale=0.5, spread=1.0, block=128
)
PLAIN = {
    **{x: functools.partial(check, (1, 500, 2, 128), 20, score=x, spread=1.0, block=128, splits=2) for x in SCORES},
    "bfloat16": lambda: check((1, 384, 2, 64), 64, scale=0.125, spread=1.0, dtype=jnp.bfloat16),
    "one attention": lambda: check((1, 256, 1, 128), 130, contrast=False, scale=0.2, spread=1.0),
    # Tokens beyond a length may be NaN; an empty history gives 0.
    "lengths": with_lengths,
    "lengths, laplace": lambda: with_lengths(score="laplace"),
    "large logits": lambda: check((1, 256, 1, 128), 9, scale=1.0, spread=1.0, block=128, splits=2),
    "default scale": lambda: check((2, 140, 2, 64), 7, scale=None, spread=1.0),
    "odd head_dim": lambda: check((1, 40, 1, 72), 7, scale=None, spread=1.0),
    "three tokens": lambda: check((1, 3, 1, 256), 7, scale=None, spread=1.0),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", slow_unless(PLAIN, (*SCORES, "bfloat16", "one attention", "lengths", "large logits"))
)
def test_plain(name):
    PLAIN[name]()


# Two heads share a tile and a third fills half of one; there are two parts, and the last block is ragged.
each_pair = functools.partial(check, (2, 300, 3, 64), 20, (2, 3, 20, 300), block=128, splits=3)
# Axes of one: numbers that batch entries, heads, compressed tokens or keys share. A mask without an axis of compressed
# tokens lies in lanes, where the kernel has no queries.
shared = functools.partial(check, (2, 200, 2, 64), 5)
# Tokens that all keys share matter for scores that are not normalized.
of_tokens = functools.partial(check, (1, 200, 1, 128), 5, (1, 1, 5, 1), score="relu2", contrast=False)
# Four strips in the forward kernel and two in the backward one; the last block is ragged.
strips = functools.partial(check, (1, 1100, 1, 128), 20, block=1024, chip="v5e")
STRIPS = {"both": ((1, 1, 20, 1100), (1, 1, 1, 1100)), "bias": ((1, 1, 1, 1100), None), "none": (None, None)}
BIASED = {
    **{f"each pair, {score}": functools.partial(each_pair, score=score) for score in SCORES},
    "shared by rows": lambda: shared((1, 2, 5, 200)),
    "of keys, a mask of rows": lambda: shared((1, 1, 1, 200), (2, 1, 1, 200)),
    "a mask of rows": lambda: shared(None, (2, 1, 1, 200)),
    "a mask of heads": lambda: shared(None, (1, 2, 1, 200)),
    "a mask of rows and tokens": lambda: shared(None, (2, 1, 5, 200)),
    "of rows, a mask of heads and tokens": lambda: shared((2, 1, 1, 200), (1, 2, 5, 1)),
    "of tokens": of_tokens,
    "of tokens, a mask of keys": lambda: of_tokens((1, 1, 1, 200)),
    **{
        f"strips, {name}, {score}": functools.partial(strips, *given, score=score)
        for name, given in STRIPS.items()
        for score in ("softmax", "laplace")
    },
    "bfloat16, one attention": lambda: check(
        (1, 256, 1, 128), 130, (1, 1, 130, 256), (1, 1, 1, 256), dtype=jnp.bfloat16, contrast=False
    ),
}  # fmt: skip
FAST = (
    "each pair, softmax", "shared by rows", "a mask of rows", "a mask of heads", "of tokens",
    "of tokens, a mask of keys", "strips, both, softmax", "bfloat16, one attention",
)  # fmt: skip


@pytest.mark.parametrize("name", slow_unless(BIASED, FAST))
def test_bias_and_mask(name):
    BIASED[name]()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("heads", "bias", "mask"), [(1, None, None), (2, (1, 2, 4, 300), (1, 1, 1, 300))], ids=["plain", "biased"]
)
def test_poisoned_memory_and_any_order(heads, bias, mask, hostile):
    check((1, 300, heads, 64), 4, bias, mask, block=128, splits=3, interpret=hostile)


@pytest.mark.parametrize(
    ("biased", "blocks", "block_size", "history", "head_dim", "ragged"),
    slow_unless(
        [
            *(
                (True, 3, *sizes, True)
                for sizes in ((16, 40, 64), (128, 128, 64), (144, 300, 64), (256, 400, 128))
            ),
            (False, 3, 128, 128, 64, False),
            (False, 4, 16, 40, 64, True),
            (False, 2, 144, 300, 64, True),
            (False, 1, 7, 150, 64, True),
        ],
        ((True, 3, 16, 40, 64, True),),
    ),
)
def test_blockwise_history(biased, blocks, block_size, history, head_dim, ragged, hostile, monkeypatch):
    """Each block agrees with a separate call on its history; NaN precedes a short history. All blocks share the bias:
    its gradient is the sum over batch and blocks, whose steps run in order. The largest blocks have two strips."""
    if biased:
        for step in (HistoryStep, GradientStep):
            monkeypatch.setattr(step, "strip", 128)
    heads, count, length = 2, 4, history + (blocks - 1) * block_size + (0 if biased else 5)
    lengths = np.full((2, blocks), history)
    if ragged:
        lengths = np.minimum(history, np.arange(blocks) * block_size + np.asarray([[0], [3]]))
    k1, k2, v = arrays(0, jnp.float32, *[(2, length, heads, head_dim)] * 3)
    shape = 2 * blocks, count, heads, head_dim
    q, g = (arrays(n, jnp.float32, shape)[0].reshape(2, blocks, *shape[1:]) for n in (4, 5))
    gamma, bias = arrays(6, jnp.float32, (heads,), (heads, count, history))
    unread = (np.arange(length) < history - lengths[:, :1])[:, :, None, None]
    keys = [jnp.where(jnp.asarray(unread), jnp.nan, x) for x in (k1, k2, v)]

    def function(q, k1, k2, v, gamma, bias):
        return compress_blocks(
            q, k1, k2, v, gamma=gamma, bias=bias, scale=0.4, block_size=block_size, history_size=history,
            history_lengths=jnp.asarray(lengths, jnp.int32) if ragged else None, interpret=hostile,
        )  # fmt: skip

    got = with_gradients(function, g, q, *keys, gamma, bias if biased else None)
    assert not np.asarray(got[0])[lengths == 0].any()

    def each_block(q, k1, k2, v, gamma, bias):
        out = jnp.zeros(q.shape)
        for i, b in np.argwhere(lengths > 0):
            stop, here = b * block_size + history, lengths[i, b]
            one, part = slice(i, i + 1), slice(stop - here, stop)
            late = None if bias is None else bias[None, :, :, history - here :]
            arrays = q[one, b], k1[one, part], k2[one, part], v[one, part]
            out = out.at[i, b].set(oracle.contrasted(*arrays, gamma, 0.4, "softmax", bias=late)[0])
        return out

    want = oracle.in_float64(each_block, g, q, k1, k2, v, gamma, bias if biased else None)
    oracle.check(got, want, 1e-5)
