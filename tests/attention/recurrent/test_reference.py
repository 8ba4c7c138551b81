"""Each function with a recurrent state against its plain form in `reference.py`, at lengths that no chunk divides."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import brl_jax
from brl_jax import RotaryBias
from brl_jax.attention.recurrent import reference
from tests.attention.recurrent.test_state_functions import close, inputs
from tests.marks import slow_unless

HEADS, KV_HEADS, SIZE = 4, 2, 8


def normal(*shape):
    return jnp.asarray(np.random.default_rng(shape).standard_normal(shape), jnp.float32)


def with_causality(options):
    return [options | {"is_causal": True}, options | {"is_causal": False}]


BIAS = RotaryBias(normal(HEADS, SIZE) / 4, normal(HEADS, SIZE) / 3)
PROJECTION = brl_jax.performer_projection(jax.random.key(0), 12, SIZE)
DECAYED = {"is_causal": True, "normalize": False, "feature_map": "identity"}
NUMBERS = 5
COMPRESSION = normal(SIZE, SIZE, NUMBERS) / 8, normal(NUMBERS, SIZE, SIZE)
# The name of the function, the extra arrays it takes after query, key and value, and its options.
CASES = [
    *(("linear_attention", (), options) for options in with_causality({})),
    *(("linear_attention", (), o) for o in with_causality({"normalize": False, "feature_map": "elu"})),
    *(("linear_attention", (decay,), DECAYED) for decay in ("head_decay", "token_decay", "feature_decay")),
    *(("norm_attention", (), options) for options in with_causality({"norm": "layer"})),
    *(("norm_attention", (), o) for o in with_causality({"norm_scale": normal(HEADS, SIZE)})),
    *(("performer_attention", (), options) for options in with_causality({"projection": PROJECTION})),
    *(("cosformer_attention", (), options) for options in with_causality({"max_length": 211})),
    *(("flow_attention", (), options) for options in with_causality({})),
    ("luna_attention", (), {"packed": normal(3, KV_HEADS, SIZE)}),
    ("delta_rule", ("beta",), {}),
    ("gated_delta_rule", ("beta", "log_decay"), {}),
    ("kimi_delta_rule", ("beta", "log_decay", "by feature"), {}),
    *(("gau_attention", (), options) for options in with_causality({"bias": BIAS})),
    *(("mixed_chunk_attention", ("linear",), o) for o in with_causality({"bias": BIAS, "chunk_size": 24})),
    *(("bsbr_attention", ("retrieval",), options) for options in with_causality({"chunk_size": 24})),
    (
        "bsbr_attention",
        ("retrieval",),
        {"chunk_size": 24, "is_causal": True, "compression": COMPRESSION, "strength": normal(HEADS)},
    ),
]


# Strong and weak decay side by side, and tokens that empty the state.
DECAYS = -jnp.asarray([0.01, 1e3, 0.1, 20.0, 0.0, jnp.inf, 0.5])


def arguments(kind, length):
    query, key, value = inputs(length, heads=HEADS, kv_heads=KV_HEADS, head_dim=SIZE)
    match kind:
        case ("beta",):
            return query, key, value, jax.nn.sigmoid(normal(2, length, KV_HEADS))
        case ("beta", "log_decay", *by_feature):
            log_decay = jnp.broadcast_to(DECAYS[jnp.arange(length) % 7][None, :, None], (2, length, KV_HEADS))
            if by_feature:  # each feature's strong tokens are others
                log_decay = jnp.stack([jnp.roll(log_decay, shift, 1) for shift in range(SIZE)], -1)
            return query, key, value, jax.nn.sigmoid(normal(2, length, KV_HEADS)), log_decay
        case ("linear",):
            return query, key, query[:, ::-1] + 1, -2 * key, value
        case ("retrieval",):
            return query, key, value, query[..., ::-1], -2 * key
        case ("head_decay",):
            return query, key, value, DECAYS[jnp.asarray([0, 3])]
        case ("token_decay",):
            return query, key, value, DECAYS[jnp.arange(2 * length * KV_HEADS).reshape(key.shape[:3]) % 7]
        case ("feature_decay",):
            # Features whose state is emptied beside those that keep it; 0.01 and 0 follow each other in some.
            return query, key, value, DECAYS[jnp.arange(key.size).reshape(key.shape) // 3 % 7]
    return query, key, value


@pytest.mark.parametrize("length", slow_unless([1, 67, 130], (67,)))
@pytest.mark.parametrize(("name", "kind", "options"), CASES)
def test_equals_its_plain_form(name, kind, options, length):
    arrays = arguments(kind, length)
    function, plain = (getattr(module, name) for module in (brl_jax, reference))

    def run(function, *arrays):
        if options is DECAYED:
            return function(*arrays[:3], log_decay=arrays[3], **options)
        return function(*arrays, **options)

    got, expected = jax.jit(lambda *arrays: (run(function, *arrays), run(plain, *arrays)))(*arrays)
    close(got, expected, 1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["token_decay", "feature_decay"])
def test_gradients_are_finite_where_a_state_is_emptied(kind):
    """-inf beside decays of hardly anything; -inf itself has no gradient, as nothing is left of the state."""
    arrays = arguments((kind,), 67)

    def loss(query, key, value, log_decay):
        out = brl_jax.linear_attention(query, key, value, log_decay=log_decay, chunk_size=24, **DECAYED)
        return jnp.sum(jnp.sin(out))

    gradients = jax.jit(jax.grad(loss, (0, 1, 2, 3)))(*arrays)
    assert all(bool(jnp.isfinite(gradient).all()) for gradient in gradients)
    assert not np.asarray(gradients[3])[np.isinf(arrays[3])].any()
    assert np.asarray(gradients[3])[np.asarray(arrays[3]) > -1].any()


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize(
    ("name", "options"),
    slow_unless(
        [("linear_attention", {}), ("norm_attention", {"feature_map": "elu"}), ("flow_attention", {})],
        ("norm_attention",),
    ),
)
def test_rotated_features_equal_their_plain_form(name, options, is_causal):
    """Each row has positions of its own."""
    positions = jnp.asarray([[5], [1000]]) + jnp.arange(67)[None]
    options = {**options, "is_causal": is_causal, "positions": positions}
    function, plain = (getattr(module, name) for module in (brl_jax, reference))
    arrays = inputs(67, heads=HEADS, kv_heads=KV_HEADS, head_dim=SIZE)
    expected = plain(*arrays, **options)
    close(function(*arrays, **options, chunk_size=24), expected, 1e-4)
    assert np.abs(plain(*arrays, **options | {"positions": None}) - expected).max() > 0.1


def test_positions_of_another_shape_are_refused():
    query, key, value = inputs(6)
    for keys, positions in ((6, jnp.arange(6)), (6, jnp.arange(7)[None]), (5, jnp.arange(6)[None])):
        with pytest.raises(ValueError, match=r"positions must have shape \(1, 6\) or \(2, 6\)"):
            brl_jax.linear_attention(query, key[:, :keys], value[:, :keys], positions=positions)
