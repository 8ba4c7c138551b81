"""Low-rank changes to a decoder's dense weights."""

import dataclasses

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import generate
from brl_jax.layers import BRLConfig, FullConfig, GatedDeltaNetConfig
from brl_jax.models import DecoderConfig, DecoderLM, huggingface
from brl_jax.models.lora import merged
from tests.support.parameters import drawn

SIZES = {"num_layers": 3, "d_model": 32, "num_heads": 4, "d_ff": 48, "vocab_size": 40}
TOKENS = np.arange(24, dtype=np.int32).reshape(2, 12)


def with_changes(**options):
    """A decoder with changes of rank 3."""
    return DecoderConfig(**SIZES, lora_rank=3, lora_alpha=6.0, **options)


def without(params):
    return {
        name: without(value) if isinstance(value, dict) else value
        for name, value in params.items()
        if not name.startswith("lora")
    }


def logits(config, params):
    return np.asarray(jax.jit(DecoderLM(config).apply)({"params": params}, TOKENS)[0])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mechanism", [FullConfig(), GatedDeltaNetConfig()])
def test_a_network_starts_as_the_one_without(mechanism, dtype):
    # Flax's norms promote bfloat16.
    with jax.numpy_dtype_promotion("standard"):
        config = with_changes(mechanism=mechanism, dtype=dtype)
        params = nn.unbox(jax.jit(DecoderLM(config).init)(jax.random.key(0), TOKENS[:, :1])["params"])
        plain = dataclasses.replace(config, lora_rank=0)
        np.testing.assert_array_equal(logits(config, params), logits(plain, without(params)))
    layer = params["stack"]["layers_0"]["block_0"]["feed_forward"]["down"]
    assert {layer["kernel"].dtype, params["embedding"].dtype} == {jnp.dtype(dtype)}
    others = (layer["lora_down"], layer["lora_up"], params["stack"]["final_norm"]["scale"])
    assert {x.dtype for x in others} == {jnp.dtype("float32")}


@pytest.mark.slow
@pytest.mark.parametrize("mechanism", [FullConfig(), BRLConfig(window=4, num_compressed=3, compressed_dim=8)])
def test_merged_weights_are_the_products_of_the_paper(mechanism):
    """W + (alpha / rank) A B in float64, for stacked layers, two axes of inputs or outputs, and carriers."""
    config = with_changes(mechanism=mechanism)
    params = drawn(DecoderLM(config).init, TOKENS[:, :1])["params"]
    plain, got = merged(config, params)
    assert plain.lora_rank == 0
    count = 0

    def check(changed, merged):
        nonlocal count
        for name, value in merged.items():
            if isinstance(value, dict):
                check(changed[name], value)
            elif name != "kernel" or "lora_up" not in changed:
                np.testing.assert_array_equal(value, changed[name])
            else:
                down, up = (np.asarray(changed[part], np.float64) for part in ("lora_down", "lora_up"))
                kernels = np.asarray(changed[name], np.float64)
                if kernels.ndim == down.ndim + up.ndim - 2:
                    kernels, value, down, up = (x[None] for x in (kernels, value, down, up))
                for w, a, b, x in zip(kernels, down, up, value):
                    np.testing.assert_allclose(x, w + 2 * np.tensordot(a, b, 1), rtol=1e-5, atol=1e-6)
                count += 1

    check(params, got)
    assert count >= 7
    merged_logits = logits(plain, got)
    np.testing.assert_allclose(merged_logits, logits(config, params), rtol=1e-4, atol=1e-4)
    assert np.abs(merged_logits - logits(plain, without(params))).max() > 0.1


@pytest.mark.slow
def test_generation_and_export_have_the_changes(tmp_path):
    pytest.importorskip("safetensors")
    config = with_changes(mechanism=FullConfig(), norm="rms", ffn="swiglu")
    params = drawn(DecoderLM(config).init, TOKENS[:, :1])["params"]
    plain, weights = merged(config, params)
    options = {"max_new_tokens": 6, "temperature": 0}
    np.testing.assert_array_equal(
        generate(DecoderLM(config), {"params": params}, TOKENS, **options),
        generate(DecoderLM(plain), {"params": weights}, TOKENS, **options),
    )
    huggingface.save(tmp_path / "out", config, params)
    read, loaded = huggingface.load(tmp_path / "out")
    np.testing.assert_allclose(logits(read, loaded), logits(config, params), rtol=1e-4, atol=1e-4)
