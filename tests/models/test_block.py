"""A block: cross-attention to an encoder's outputs, and dropout of each sublayer."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from brl_jax import BRLConfig, DecoderConfig, DecoderLM, FullConfig, LocalConfig, Stack, TLinFormerConfig
from brl_jax.models.block import Block
from brl_jax.models.cross_attention import CrossAttention, CrossCall, CrossConfig, Encoded
from brl_jax.models.networks import make_stack
from tests.laws.cases import dimensions
from tests.marks import slow_unless
from tests.oracles.attention import softmax_attention
from tests.oracles.parts import project, rotary
from tests.support.generation import in_pieces
from tests.support.numbers import as_float64, relative_error
from tests.support.parameters import drawn

D = dimensions(True)
CALL = {"positions": None, "lengths": None, "segment_ids": None, "count": None}


def draw(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def dense_cross_attention(params, x, encoded, lengths):
    """Softmax over the existing encoder outputs, in NumPy."""
    p, x, encoded = (as_float64(each) for each in (params, x, encoded))
    exists = np.arange(encoded.shape[1]) < np.asarray(lengths)[:, None]
    query, key, value = (
        project(a, p[name]) for name, a in (("query", x), ("key", encoded), ("value", encoded))
    )
    return merged(softmax_attention(query, key, value, exists[:, None, None])[0], p)


def merged(heads, p):
    return np.tensordot(heads, p["out"]["kernel"], axes=2)


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_cross_attention_is_dense_attention_to_what_exists(kv_heads):
    layer = CrossAttention(
        CrossConfig(), dataclasses.replace(D, num_heads=4, head_dim=4, num_kv_heads=kv_heads)
    )

    @jax.jit
    def run(encoded):
        return layer.apply(variables, x, CrossCall(encoded))[0]

    x, outputs, lengths = draw(2, 5, 16), draw(2, 9, 16, seed=1), jnp.array([4, 9])
    variables = drawn(layer.init, x, CrossCall(Encoded(outputs)))
    got = run(Encoded(outputs, lengths))
    expected = dense_cross_attention(variables["params"], x, outputs, lengths)
    assert relative_error(got, expected) < 1e-5
    # Padding has no effect, even if it is NaN; by default all outputs exist.
    poisoned = outputs.at[0, 4:].set(jnp.nan)
    np.testing.assert_array_equal(run(Encoded(poisoned, lengths)), got)
    whole = dense_cross_attention(variables["params"], x, outputs, [9, 9])
    assert relative_error(run(Encoded(outputs)), whole) < 1e-5


@pytest.mark.parametrize("remat", slow_unless(["none", "full"], ("none",)))
def test_a_stack_reads_an_encoder_in_every_layer(remat):
    stack = Stack((LocalConfig(window=2),) * 2, D, remat, cross_attention=CrossConfig())
    x, encoded = draw(2, 7, 16), Encoded(draw(2, 5, 16, seed=1), jnp.array([3, 5]))
    variables = drawn(stack.init, x, encoded=encoded)
    plain = jax.eval_shape(Stack((LocalConfig(window=2),) * 2, D).init, jax.random.key(0), x)
    block = variables["params"]["layers_0"]["block_0"]
    assert set(block) - set(plain["params"]["layers_0"]["block_0"]) == {"cross_mixer", "cross_norm"}
    run = jax.jit(lambda outputs: stack.apply(variables, x, encoded=Encoded(outputs, encoded.lengths))[0])
    y = run(encoded.outputs)
    # Every existing output affects every token, and padding affects none.
    np.testing.assert_array_equal(run(encoded.outputs.at[0, 3:].set(9.0)), y)
    moved = run(encoded.outputs.at[0, 2].multiply(-1.0))
    assert (np.abs(moved - y)[0].max(axis=-1) > 1e-4).all()
    np.testing.assert_array_equal(moved[1], y[1])
    slope = jax.jit(jax.grad(lambda outputs: stack.apply(variables, x, encoded=Encoded(outputs))[0].sum()))
    assert np.isfinite(slope(encoded.outputs)).all()
    assert relative_error(in_pieces(stack, variables, x, [1] * 7, encoded=encoded)[0], y) < 1e-5


@pytest.mark.slow
def test_a_stack_in_segments_reads_an_encoder():
    mechanism = BRLConfig(window=3, num_compressed=2, block_size=4, memory="output")
    stack = Stack((mechanism,) * 2, D, cross_attention=CrossConfig())
    x, encoded = draw(1, 10, 16), Encoded(draw(1, 5, 16, seed=1))
    variables = drawn(stack.init, x[:, :1], encoded=encoded)
    run = jax.jit(lambda outputs: stack.apply(variables, x, encoded=Encoded(outputs))[0])
    change = np.abs(run(encoded.outputs * 2) - run(encoded.outputs)).max(axis=(0, 2))
    assert (change > 1e-4).all()


def test_what_cross_attention_refuses():
    x, encoded = draw(1, 3, 16), Encoded(draw(1, 5, 16))
    with pytest.raises(ValueError, match="encoded must not be given with cross_attention=None"):
        Stack((FullConfig(),), D).init(jax.random.key(0), x, encoded=encoded)
    with pytest.raises(ValueError, match=r"encoded must be given with cross_attention=CrossConfig\("):
        Stack((FullConfig(),), D, cross_attention=CrossConfig()).init(jax.random.key(0), x)
    with pytest.raises(ValueError, match=r"cross_attention must be None with tlinformer, got CrossConfig\("):
        make_stack((TLinFormerConfig(hidden=0),) * 2, D, cross_attention=CrossConfig())


@pytest.mark.parametrize("sublayer", ["mixer", "cross_mixer", "feed_forward"])
def test_dropout_reaches_each_sublayer(sublayer):
    """One sublayer's contribution, with the others silent: half of it is 0, the other half doubled."""
    block = Block(FullConfig(), dataclasses.replace(D, dropout=0.5), cross_attention=CrossConfig())
    x, encoded = draw(2, 40, 16), Encoded(draw(2, 5, 16, seed=1))
    init = lambda key: block.init(key, x, None, None, CALL, True, CrossCall(encoded))  # noqa: E731
    params = drawn(init)["params"]
    last = {"mixer": "out", "cross_mixer": "out", "feed_forward": "down"}
    for other, layer in last.items():
        if other != sublayer:
            silent = jax.tree.map(jnp.zeros_like, params[other][layer])
            params = {**params, other: {**params[other], layer: silent}}

    @functools.partial(jax.jit, static_argnums=0)
    def run(deterministic, key):
        rngs = {"dropout": key}
        return (
            block.apply(
                {"params": params}, x, None, None, CALL, deterministic, CrossCall(encoded), rngs=rngs
            )[0]
            - x
        )

    def added(deterministic, seed=0):
        return np.asarray(run(deterministic, jax.random.key(seed)))

    whole, dropped = added(True), added(False)
    gone = dropped == 0
    assert 0.4 < gone.mean() < 0.6
    np.testing.assert_allclose(dropped[~gone], 2 * whole[~gone], rtol=1e-4, atol=1e-5)
    assert (gone != (added(False, 1) == 0)).any()


def test_output_norms_own_logits_and_their_bound():
    """Norms remove the scale of the sublayers' outputs, the logits have a separate table, and the bound holds."""
    config = DecoderConfig(
        num_layers=1, d_model=8, num_heads=3, head_dim=6, d_ff=8, vocab_size=5, mechanism=FullConfig(qk_norm=True),
        norm="rms", output_norms=True, tied_embeddings=False, embedding_scale=0.5, norm_epsilon=0.0,
    )  # fmt: skip
    tokens = jnp.arange(5)[None]
    params = drawn(DecoderLM(config).init, tokens)["params"]

    def logits(config, change):
        flat = traverse_util.flatten_dict(params)
        changed = {path: x * change.get(path[-2], 1.0) if path[1:] else x for path, x in flat.items()}
        return np.asarray(
            DecoderLM(config).apply({"params": traverse_util.unflatten_dict(changed)}, tokens)[0]
        )

    want = logits(config, {})
    np.testing.assert_allclose(
        logits(config, {"out": 7.0, "down": 9.0, "query": 3.0}), want, rtol=1e-4, atol=1e-5
    )
    doubled = {**params, "unembedding": 2 * params["unembedding"]}
    got = DecoderLM(config).apply({"params": doubled}, tokens)[0]
    np.testing.assert_allclose(got, 2 * want, rtol=1e-5)
    capped = logits(dataclasses.replace(config, final_soft_cap=0.25), {})
    np.testing.assert_allclose(capped, 0.25 * np.tanh(want / 0.25), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("options", [{}, {"tied_embeddings": False}, {"mup_base_width": 64}])
def test_logits_begin_at_unit_size_also_for_the_token_itself(options):
    """The logit of a row of the table with the stream that begins as this row would be sqrt(64) = 8."""
    sizes = {"num_layers": 1, "d_model": 64, "num_heads": 2, "vocab_size": 256, "mechanism": FullConfig()}
    tokens = jax.random.randint(jax.random.key(1), (8, 64), 0, 256)
    logits = DecoderLM(DecoderConfig(**sizes, **options)).init_with_output(jax.random.key(0), tokens)[0][0]
    own = np.take_along_axis(np.asarray(logits), np.asarray(tokens)[..., None], -1)
    assert 0.8 < np.std(logits) < 1.2
    assert np.abs(own).mean() < 1.5
    targets = jnp.roll(tokens, 1, 0)  # from another row
    loss = -np.take_along_axis(np.asarray(jax.nn.log_softmax(logits)), np.asarray(targets)[..., None], -1)
    assert abs(loss.mean() - (np.log(256) + 0.5)) < 0.3  # log of the mean of exp(x), x normal, is 0.5


def test_cross_attention_reads_a_window_and_compressed_tokens():
    """Both are added before the output projection; queries and keys are rotated by their positions (float64 oracle)."""
    d = dataclasses.replace(D, num_heads=2, num_kv_heads=2, head_dim=4)
    layer = CrossAttention(CrossConfig(window=6, rope=True), d)
    x, outputs, compressed = draw(2, 7, 16), draw(2, 11, 16, seed=1), draw(2, 3, 6, seed=2)
    lengths = [6, 11]
    call = CrossCall(Encoded(outputs, jnp.array(lengths), compressed))
    variables = drawn(layer.init, x, call)
    run = jax.jit(lambda x, call: layer.apply(variables, x, call)[0])
    got = run(x, call)
    for start in range(7):  # from any position, as in generation, which reads at most 8 of the 11 keys
        piece = slice(start, start + 2)
        found = run(x[:, piece], call._replace(start=jnp.int32(start)))
        assert relative_error(found, got[:, piece]) < 1e-5
    p = as_float64(variables["params"])
    x, outputs, compressed = (as_float64(a) for a in (x, outputs, compressed))

    def turned(rows):
        return np.stack([rotary(row, np.arange(len(row)), d.rope_theta) for row in rows])

    exists = (np.arange(11) < np.array(lengths)[:, None])[:, None, None]
    near = np.abs(np.arange(11)[None] - np.arange(7)[:, None]) <= 3
    query, key = turned(project(x, p["query"])), turned(project(outputs, p["key"]))
    read, _ = softmax_attention(query, key, project(outputs, p["value"]), near & exists)
    names = zip(("query", "key", "value"), (x, compressed, compressed))
    given = (project(rows, p[f"compressed_{name}"]) for name, rows in names)
    propagated, _ = softmax_attention(*given, True)
    assert relative_error(got, merged(read + p["lambda"][:, None] * propagated, p)) < 1e-5
