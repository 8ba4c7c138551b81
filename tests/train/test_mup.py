"""muP: the learning rate of each kind of weight, and what stays constant in size as the network widens."""

import dataclasses
import math

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax.layers import BilinearBTTConfig, BilinearMLRConfig, FullConfig, HopfieldConfig, MLRConfig
from brl_jax.models import Classifier, DecoderConfig, DecoderLM, EncoderConfig
from brl_jax.sharding import MeshConfig, make_mesh
from tests.marks import slow_unless
from tests.train.toy import OBJECTIVE, batch_of
from train.engine.batch import Batch
from train.engine.config import LoopConfig
from train.engine.mesh import place_batch, training_programs
from train.engine.optimizer import OptimizerConfig, decayed
from train.tasks.lm import lm_objective
from train.tasks.mup import make_rates, mup_rates

TOKENS = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)


def small(mechanism, **changes):
    settings = {"num_layers": 2, "d_model": 16, "num_heads": 2, "d_ff": 24, "vocab_size": 12}
    return DecoderConfig(**(settings | {"mechanism": mechanism} | changes))


def boxed_params(config):
    model = (Classifier if isinstance(config, EncoderConfig) else DecoderLM)(config)
    return jax.eval_shape(model.init, jax.random.key(0), TOKENS)["params"]


def by_name(tree):
    return {
        "/".join(key.key for key in path).split("block_0/")[-1]: leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }


def test_rates_by_the_kind_of_the_weight():
    config = small(FullConfig(), use_bias=True, mup_base_width=4)
    rates = by_name(make_rates(config)(boxed_params(config)))
    matrices = {name: rate for name, rate in rates.items() if name.endswith("kernel")}
    assert len(matrices) == 7
    assert set(matrices.values()) == {0.25}
    assert {rate for name, rate in rates.items() if name not in matrices} == {1.0}
    encoder = EncoderConfig(
        num_layers=1, d_model=16, num_heads=2, d_ff=24, mechanism=FullConfig(), inputs="scale", positions="learned",
        mup_base_width=8,
    )  # fmt: skip
    rates = by_name(make_rates(encoder)(boxed_params(encoder)))
    assert rates["encoder/embedding/kernel"] == rates["encoder/positions"] == rates["head/out/bias"] == 1.0
    assert rates["head/hidden/kernel"] == rates["head/out/kernel"] == 0.5


def test_cores_of_structured_weights_go_by_what_they_sum_over():
    config = small(BilinearMLRConfig(ranks=(3, 3, 2)), mup_base_width=8)
    rates = by_name(make_rates(config)(boxed_params(config)))
    assert [rates[f"mixer/query_{level}"] for level in range(3)] == [8 / 16, 8 / 8, 8 / 4]
    assert rates["mixer/key_norm_1"] == 1.0
    config = small(BilinearBTTConfig(rank=2), mup_base_width=8)
    rates = by_name(make_rates(config)(boxed_params(config)))
    assert (rates["mixer/right"], rates["mixer/left"]) == (8 / 4, 8 / (4 * 2))  # 16 = 4 x 4, two terms


@pytest.mark.slow
def test_at_the_base_width_muP_changes_nothing():
    standard = small(FullConfig())
    same = dataclasses.replace(standard, mup_base_width=16)
    variables = [nn.unbox(jax.jit(DecoderLM(c).init)(jax.random.key(0), TOKENS)) for c in (standard, same)]
    jax.tree.map(np.testing.assert_array_equal, *variables)
    plain, ours = (jax.jit(DecoderLM(c).apply)(variables[0], TOKENS)[0] for c in (standard, same))
    np.testing.assert_array_equal(plain, ours)
    assert set(jax.tree.leaves(make_rates(same)(boxed_params(same)))) == {1.0}


@pytest.mark.parametrize(
    "mechanism",
    slow_unless([FullConfig(), HopfieldConfig(steps=3), MLRConfig(ranks=(4, 4), context=4)], (FullConfig(),)),
    ids=str,
)
def test_scores_are_over_the_size_of_a_head(mechanism):
    """Moving muP's factor into the query weights of a standard layer gives muP's output. Hopfield's later steps have no
    query weights, so its inverse temperature takes the factor; MLR's scores already divide by the head size."""
    d = small(mechanism).dimensions
    wide = dataclasses.replace(d, base_width=4, base_head_dim=2)
    x = jax.random.normal(jax.random.key(1), (2, 6, 16))
    variables = nn.unbox(jax.jit(mechanism.layer(d).init)(jax.random.key(0), x))
    ours = jax.jit(mechanism.layer(wide).apply)(variables, x)[0]
    factor = math.sqrt(2 / 8)
    expected = mechanism
    if isinstance(mechanism, HopfieldConfig):
        expected = dataclasses.replace(mechanism, beta=factor / math.sqrt(8))
    elif isinstance(mechanism, FullConfig):
        params = variables["params"]
        query = {"kernel": params["query"]["kernel"] * factor}
        variables = {"params": {**params, "query": query}}
    standard = jax.jit(expected.layer(d).apply)(variables, x)[0]
    np.testing.assert_allclose(ours, standard, rtol=1e-5, atol=1e-6)


def test_logits_of_a_wider_model_are_scaled_down():
    wide = small(FullConfig(), mup_base_width=4)
    model = DecoderLM(wide)
    variables = nn.unbox(jax.jit(model.init)(jax.random.key(0), TOKENS))
    assert float(jnp.std(variables["params"]["embedding"])) == pytest.approx(0.5, rel=0.2)  # 4 ** -0.5
    hidden, _ = jax.jit(lambda v: model.apply(v, TOKENS, method="hidden"))(variables)
    logits, _ = jax.jit(model.apply)(variables, TOKENS)
    expected = hidden @ variables["params"]["embedding"].T / 4
    np.testing.assert_allclose(logits, expected, rtol=1e-5, atol=1e-6)


def test_a_classifier_begins_undecided():
    config = EncoderConfig(num_layers=1, d_model=16, num_heads=2, mechanism=FullConfig(), mup_base_width=8)
    model = Classifier(config)
    logits = jax.jit(model.apply)(nn.unbox(jax.jit(model.init)(jax.random.key(0), TOKENS)), TOKENS)
    np.testing.assert_array_equal(logits, np.zeros((2, 2)))


def test_an_objective_hands_its_rates_on():
    config = small(FullConfig(), mup_base_width=8)
    objective = lm_objective(DecoderLM(config))
    boxed = jax.eval_shape(objective.init, jax.random.key(0))
    assert by_name(objective.rates(boxed))["mixer/out/kernel"] == 0.5
    assert lm_objective(DecoderLM(small(FullConfig()))).rates(boxed) is None
    # Naming the summed axes of the cores must not turn them into matrices that decay.
    cores = by_name(decayed(boxed_params(small(BilinearBTTConfig()))))
    assert not cores["mixer/right"]
    assert not cores["mixer/left"]


def test_bad_settings_are_named():
    with pytest.raises(ValueError, match=r"mup_base_width must be a multiple of the 3 heads .*, got 8"):
        small(FullConfig(), mup_base_width=8, mup_base_heads=3)
    with pytest.raises(ValueError, match="expected logical axis names for every parameter, got none for a/w"):
        mup_rates({"a": {"w": jnp.ones(2)}}, base_width=2, width=4)


def test_training_takes_the_rates_of_the_objective():
    """A parameter whose rate is zero does not move."""
    objective = dataclasses.replace(OBJECTIVE, rates=lambda boxed: {"table": 0.0, "past": 1.0})
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    with jax.set_mesh(mesh):
        programs = training_programs(mesh, objective, OptimizerConfig(weight_decay=0.0), LoopConfig(batch=4))
        state = programs.fresh()
        before = jax.tree.map(np.array, state.params)
        state, _ = programs.step(state, place_batch(mesh, Batch(batch_of(0), reset=np.bool_(True)), 4))
    np.testing.assert_array_equal(state.params["table"], before["table"])
    assert (np.asarray(state.params["past"]) != before["past"]).any()
