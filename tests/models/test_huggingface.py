"""Networks of transformers, made at random on the spot, give the same logits and the same text here, and back again."""

import json
import logging

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import generate
from brl_jax.attention.core.rotary import RopeScaling
from brl_jax.layers import MECHANISMS
from brl_jax.models import DecoderConfig, DecoderLM, EncoderDecoderConfig, huggingface
from brl_jax.models.huggingface.architectures import architecture_of
from brl_jax.models.huggingface.configs import meaning, read_config, write_config
from brl_jax.models.huggingface.weights import to_parameters, to_tensors

FullConfig, LocalConfig = MECHANISMS["full"], MECHANISMS["local"]
SMALL = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
GEMMA = SMALL | {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 9, "num_hidden_layers": 5}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0},
}
LLAMA = {"model_type": "llama", **SMALL}
# Two linear layers and a full one, twice.
NEXT = {
    "model_type": "qwen3_next",
    **SMALL,
    "num_hidden_layers": 6,
    "head_dim": 24,
    "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 5,
    "num_experts": 0,
}
CASES = {
    "llama": LLAMA,
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-head-dim": LLAMA | {"head_dim": 10, "hidden_act": "relu", "rms_norm_eps": 1e-3},
    "llama-linear": LLAMA | {"rope_theta": 500.0, "rope_scaling": SCALINGS["linear"]},
    "llama-llama3": LLAMA | {"rope_scaling": SCALINGS["llama3"]},
    "llama-yarn": LLAMA | {"rope_scaling": SCALINGS["yarn"]},
    "mistral": {"model_type": "mistral", **SMALL, "sliding_window": 6},
    "mistral-full": {"model_type": "mistral", **SMALL, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen2-window": {
        "model_type": "qwen2",
        **SMALL,
        "num_hidden_layers": 3,
        "use_sliding_window": True,
        "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 16},
    "qwen3-next": NEXT,
    "qwen3-next-order": NEXT
    | {
        "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2,
        "partial_rotary_factor": 1 / 3,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 1,
        "linear_conv_kernel_dim": 3,
        "tie_word_embeddings": True,
        "rope_theta": 500.0,
    },
    "gemma": {"model_type": "gemma", **SMALL, "head_dim": 16},
    "gemma2": {
        "model_type": "gemma2",
        **GEMMA,
        "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0,
    },
    "gemma3": {
        "model_type": "gemma3_text",
        **GEMMA,
        "sliding_window_pattern": 3,
        "rope_theta": 1e5,
        "rope_local_base_freq": 100.0,
        "rope_scaling": SCALINGS["linear"],
    },
}


@pytest.fixture(scope="module")
def transformers():
    library = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    # Its warnings about what a release will drop are not about this library.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return library


def their_model(transformers, values):
    """A random network whose biases and norms are not at their neutral values."""
    import torch

    torch.manual_seed(0)
    values = json.loads(json.dumps(values))
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            size = parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1.0
            parameter.add_(0.3 / size * torch.randn_like(parameter))
    return model


def their_logits(model, tokens):
    import torch

    with torch.no_grad():
        return model(torch.tensor(np.asarray(tokens))).logits.numpy()


def our_logits(config, params, tokens):
    return DecoderLM(config).apply({"params": params}, jnp.asarray(tokens, jnp.int32))[0]


TOKENS = np.random.default_rng(0).integers(0, SMALL["vocab_size"], (2, 40))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # those of torch and transformers
@pytest.mark.parametrize("name", CASES)
def test_logits_and_generation_are_those_of_transformers(name, transformers, tmp_path):
    import torch

    theirs = their_model(transformers, CASES[name])
    theirs.save_pretrained(tmp_path / "theirs")
    config, params = huggingface.load(tmp_path / "theirs")
    want = their_logits(theirs, TOKENS)
    got = our_logits(config, params, TOKENS)
    assert want.std() > 0.1
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)

    prompts, lengths = TOKENS[:, :11], [11, 7]
    text = np.asarray(
        generate(
            DecoderLM(config), {"params": params}, prompts, lengths=lengths, max_new_tokens=12, temperature=0
        )
    )
    for row, length, prompt in zip(text, lengths, prompts):
        alone = theirs.generate(torch.tensor(prompt[None, :length]), max_new_tokens=12, do_sample=False)
        np.testing.assert_array_equal(row[: length + 12], alone[0].numpy())

    kind = huggingface.save(tmp_path / "ours", config, params, max_length=128)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager", dtype=torch.float32
    ).eval()
    assert kind == CASES[name]["model_type"] or name == "mistral-full"
    np.testing.assert_allclose(their_logits(loaded, TOKENS), want, rtol=1e-4, atol=1e-4)
    again, same = huggingface.load(tmp_path / "ours")
    assert meaning(again) == meaning(config)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), same, params)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_shards_and_half_precision(transformers, tmp_path):
    import torch

    theirs = their_model(transformers, LLAMA).to(torch.bfloat16)
    theirs.save_pretrained(tmp_path, max_shard_size="8KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    config, params = huggingface.load(tmp_path)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype("float32")}
    want = their_logits(theirs.float(), TOKENS)
    np.testing.assert_allclose(our_logits(config, params, TOKENS), want, rtol=1e-4, atol=1e-4)
    shard = next(tmp_path.glob("model-00002-*"))
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=rf"index.json names {shard.name}, which is missing"):
        huggingface.load(tmp_path)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_network_of_this_library_in_transformers(transformers, tmp_path):
    """Its embedding is tied and scaled, which only Gemma's is: the scaled table is written besides."""
    config = DecoderConfig(
        num_layers=3, d_model=32, num_heads=4, d_ff=40, norm="rms", ffn="swiglu", mechanism=LocalConfig(window=5),
        vocab_size=61,
    )  # fmt: skip
    params = DecoderLM(config).init(jax.random.key(0), jnp.asarray(TOKENS, jnp.int32))["params"]
    assert huggingface.save(tmp_path / "model", config, params) == "mistral"
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", attn_implementation="eager"
    )
    want = our_logits(config, params, TOKENS)
    np.testing.assert_allclose(their_logits(loaded.eval(), TOKENS), want, rtol=1e-4, atol=1e-4)
    both = DecoderConfig(
        num_layers=2, d_model=32, num_heads=4, norm="rms", ffn="swiglu", mechanism=FullConfig()
    )
    params = DecoderLM(both).init(jax.random.key(0), jnp.asarray(TOKENS, jnp.int32))["params"]
    assert huggingface.save(tmp_path / "scaled", both, params) == "gemma"


def test_a_folder_is_written_whole_and_read_back(tmp_path):
    pytest.importorskip("safetensors")
    config = read_config({**LLAMA, "num_hidden_layers": 1, "rope_scaling": SCALINGS["llama3"]})
    assert config.mechanism.rope_scaling == RopeScaling("llama3", 4.0, 16, 1.0, 4.0)
    shapes = jax.eval_shape(DecoderLM(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), "int32"))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), nn.unbox(shapes))[
        "params"
    ]
    (tmp_path / "tokenizer.json").write_text("{}")
    assert huggingface.save(tmp_path / "a", config, params, tokenizer=tmp_path, dtype="bfloat16") == "llama"
    names = {"config.json", "model.safetensors", "tokenizer.json"}
    assert {file.name for file in (tmp_path / "a").iterdir()} == names
    again, same = huggingface.load(tmp_path / "a")
    assert meaning(again) == meaning(config)
    jax.tree.map(
        lambda a, b: np.testing.assert_array_equal(
            a, jnp.asarray(b).astype(jnp.bfloat16).astype(jnp.float32)
        ),
        same,
        params,
    )
    with pytest.raises(FileExistsError, match="exists and is not empty"):
        huggingface.save(tmp_path / "a", config, params)
    with pytest.raises(ValueError, match=r"params lack stack/final_norm/scale"):
        huggingface.save(tmp_path / "b", config, params | {"stack": {}})
    assert not (tmp_path / "b").exists()
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 2}, "the weights lack model.layers.1.self_attn.q_proj.weight"),
        ({"intermediate_size": 40}, r"mlp.gate_proj.weight must have the shape \(40, 32\), got \(48, 32\)"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be an integer of at least 1, got 0"),
    ):
        (tmp_path / "a" / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(ValueError, match=message):
            huggingface.load(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(json.dumps(values))
    (tmp_path / "a" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        huggingface.load(tmp_path / "a")


def test_tensors_of_gated_deltanet_hold_several_parameters():
    """Every tensor of a Qwen3-Next goes into parameters of ours and comes back from them."""
    config = read_config(NEXT)
    architecture = architecture_of(NEXT)
    shapes = jax.eval_shape(DecoderLM(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), "int32"))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), nn.unbox(shapes))
    tensors = to_tensors(config, architecture, params["params"])
    first = "model.layers.0.linear_attn"
    # A key head of 8 with three value heads of 5: query, key, values and gates.
    assert tensors[f"{first}.in_proj_qkvz.weight"].shape == (2 * (8 + 8 + 15 + 15), 32)
    mixer = params["params"]["stack"]["layers_0"]["block_0"]["mixer"]
    projected = tensors[f"{first}.in_proj_qkvz.weight"].reshape(2, 46, 32)
    np.testing.assert_array_equal(projected[1, 8:16].T, mixer["key"]["kernel"][0, :, 1])
    np.testing.assert_array_equal(projected[1, 21:26].T, mixer["value"]["kernel"][0, :, 4])
    np.testing.assert_array_equal(projected[0, 41:46].T, mixer["gate"]["kernel"][0, :, 2])
    again = to_parameters(config, architecture, tensors, tensors.__getitem__)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), again, params["params"])
    assert write_config(config, None)[1]["max_position_embeddings"] == 8192
    _, values = write_config(config, 64)
    assert values["model_type"] == "qwen3_next"
    assert {k: values[k] for k in NEXT if k in values} == {k: NEXT[k] for k in NEXT if k in values} | {
        "max_position_embeddings": 64
    }


def test_what_has_no_counterpart_is_named():
    for change, message in (
        ({"num_experts": 4}, "num_experts=4 makes 6 of 6 layers mixtures of experts"),
        ({"num_experts": 4, "mlp_only_layers": [0, 2, 4], "decoder_sparse_step": 3}, "makes 1 of 6 layers"),
        ({"attention_bias": True}, "attention_bias must be false with linear_attention layers"),
        ({"partial_rotary_factor": 0.05}, "partial_rotary_factor must give an even number of the 24"),
        ({"layer_types": ["sliding_attention"] * 6}, "layer_types must be 6 of full_attention, linear_att"),
    ):
        with pytest.raises(ValueError, match=message):
            read_config(NEXT | change)
    dense = {"num_experts": 4, "mlp_only_layers": [0, 2, 4], "decoder_sparse_step": 7}
    assert meaning(read_config(NEXT | dense)) == meaning(read_config(NEXT))
    for change, message in (
        ({"model_type": "gpt_oss"}, "model_type must be one of llama, mistral, .* got 'gpt_oss'"),
        (
            {"hidden_act": "quick_gelu"},
            "hidden_act must be one of silu, gelu_pytorch_tanh, relu, got 'quick_gelu'",
        ),
        (
            {"num_local_experts": 8},
            "num_local_experts=8 is not supported for llama; supported are vocab_size",
        ),
        ({"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        (
            {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
            "rope_type must be one of default, .* got 'dynamic'",
        ),
        ({"rope_scaling": {"type": "linear"}}, "rope_type linear needs the field factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1, got 0.5"),
        ({"hidden_size": None}, "hidden_size must be an integer of at least 1, got None"),
    ):
        with pytest.raises(ValueError, match=message):
            read_config(LLAMA | change)
    types = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "full_attention"]
    with pytest.raises(ValueError, match="layer_types must be one kind and then the other, or repeat"):
        read_config({"model_type": "gemma2", **GEMMA, "layer_types": types})
    with pytest.raises(
        ValueError, match=r"no supported architecture .* differs in .*sinks|differs in mechanism"
    ):
        huggingface.save(
            "unused", DecoderConfig(norm="rms", ffn="swiglu", mechanism=FullConfig(sinks=True)), {}
        )
    # The decoder of an encoder-decoder reads what no file would have.
    with pytest.raises(ValueError, match="the nearest, llama, differs in cross_attention"):
        huggingface.save(
            "unused",
            EncoderDecoderConfig(norm="rms", ffn="swiglu", embedding_scale=1.0, mechanism=FullConfig()),
            {},
        )
    with pytest.raises(
        ValueError, match=r"head_dim must be d_model / num_heads = 64 with mechanism BRLConfig, got 8"
    ):
        DecoderConfig(head_dim=8)
    with pytest.raises(ValueError, match="output_norms must be False with mechanism TLinFormerConfig"):
        DecoderConfig(output_norms=True, mechanism=MECHANISMS["tlinformer"]())
