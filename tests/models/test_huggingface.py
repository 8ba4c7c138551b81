"""Random networks of transformers give the same logits and text here, and survive the way back."""

import dataclasses
import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from brl_jax import generate
from brl_jax.attention.core.rotary import RopeScaling
from brl_jax.layers import MECHANISMS
from brl_jax.models import DecoderConfig, DecoderLM, EncoderDecoderConfig, huggingface
from brl_jax.models.huggingface.architectures import ARCHITECTURES, architecture_of, text_part
from brl_jax.models.huggingface.configs import meaning, read_config, write_config
from brl_jax.models.huggingface.weights import to_parameters, to_tensors
from tests.support.parameters import drawn
from tests.support.texts import full_disk

FullConfig, LocalConfig = MECHANISMS["full"], MECHANISMS["local"]
SMALL = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "bos_token_id": None, "eos_token_id": None,
    "pad_token_id": None,
}  # fmt: skip
GEMMA = SMALL | {"head_dim": 12, "sliding_window": 5, "query_pre_attn_scalar": 9, "num_hidden_layers": 5}
SCALINGS = {
    "linear": {"rope_type": "linear", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 8.0},
}  # fmt: skip
LLAMA = {"model_type": "llama", **SMALL}
# Two linear layers and a full one, twice.
HYBRID = {
    "num_hidden_layers": 6, "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8, "linear_value_head_dim": 5,
}  # fmt: skip
NEXT = {
    "model_type": "qwen3_next", **SMALL, **HYBRID, "head_dim": 24, "partial_rotary_factor": 0.5, "num_experts": 0,
}  # fmt: skip
QWEN35 = {
    "model_type": "qwen3_5_text", **SMALL, **HYBRID, "head_dim": 24,
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e5, "partial_rotary_factor": 0.5, "mrope_interleaved": True,
        "mrope_section": [2, 2, 2],
    },
}  # fmt: skip
# Without positions.
OLMO_HYBRID = {
    "model_type": "olmo_hybrid", **SMALL, **HYBRID, "rms_norm_eps": 1e-3,
    "rope_parameters": {"rope_type": "default", "rope_theta": None},
}  # fmt: skip
CASES = {
    "llama": LLAMA,
    "llama-biases": LLAMA | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "llama-head-dim": LLAMA | {"head_dim": 10, "hidden_act": "relu", "rms_norm_eps": 1e-3},
    "llama-linear": LLAMA | {"rope_theta": 500.0, "rope_scaling": SCALINGS["linear"]},
    "llama-llama3": LLAMA | {"rope_scaling": SCALINGS["llama3"]},
    "llama-yarn": LLAMA | {"rope_scaling": SCALINGS["yarn"]},
    "llama-yarn-fractions": LLAMA | {"rope_scaling": SCALINGS["yarn"] | {"truncate": False}},
    "llama-gelu": LLAMA | {"hidden_act": "gelu"},
    "mistral": {"model_type": "mistral", **SMALL, "sliding_window": 6},
    "mistral-full": {"model_type": "mistral", **SMALL, "sliding_window": None},
    "qwen2": {"model_type": "qwen2", **SMALL},
    "qwen2-window": {
        "model_type": "qwen2", **SMALL, "num_hidden_layers": 3, "use_sliding_window": True, "sliding_window": 4,
        "max_window_layers": 1,
    },
    "qwen3": {"model_type": "qwen3", **SMALL, "head_dim": 16},
    "qwen3-next": NEXT,
    "qwen3-next-order": NEXT | {
        "layer_types": ["linear_attention"] * 2 + ["full_attention"] * 2, "partial_rotary_factor": 1 / 3,
        "num_hidden_layers": 4, "linear_num_key_heads": 1, "linear_conv_kernel_dim": 3, "tie_word_embeddings": True,
        "rope_theta": 500.0,
    },
    "qwen3-5": QWEN35,
    "qwen3-5-defaults": {
        "model_type": "qwen3_5_text", **SMALL, "num_hidden_layers": 5, "head_dim": 24, "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "tie_word_embeddings": True, "rope_scaling": SCALINGS["yarn"],
    },
    "qwen3-5-with-images": {
        "model_type": "qwen3_5", "text_config": QWEN35, "tie_word_embeddings": True,
        "vision_config": {
            "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
            "num_position_embeddings": 16,
        },
    },
    "olmo2": {"model_type": "olmo2", **SMALL, "rope_theta": 500.0},
    "olmo2-biases": {"model_type": "olmo2", **SMALL, "attention_bias": True, "num_key_value_heads": None},
    "olmo3": {
        "model_type": "olmo3", **SMALL, "num_hidden_layers": 8, "sliding_window": 5, "rope_scaling": SCALINGS["yarn"],
    },
    "olmo3-bases": {
        "model_type": "olmo3", **SMALL, "sliding_window": 3, "layer_types": ["full_attention", "sliding_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 1e3},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    },
    "smollm3": {"model_type": "smollm3", **SMALL, "num_hidden_layers": 6, "rope_scaling": SCALINGS["yarn"]},
    "smollm3-window": {
        "model_type": "smollm3", **SMALL, "no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 4,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
    },
    "olmo-hybrid": OLMO_HYBRID,
    "olmo-hybrid-defaults": {"model_type": "olmo_hybrid", **SMALL, "num_hidden_layers": 8},
    "olmo-hybrid-positive": OLMO_HYBRID | {
        "linear_allow_neg_eigval": False, "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
        "tie_word_embeddings": True,
    },
    "gemma": {"model_type": "gemma", **SMALL, "head_dim": 16},
    "gemma2": {"model_type": "gemma2", **GEMMA, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0},
    "gemma3": {
        "model_type": "gemma3_text", **GEMMA, "sliding_window_pattern": 3, "rope_theta": 1e5,
        "rope_local_base_freq": 100.0, "attn_logit_softcapping": 0.5, "rope_scaling": SCALINGS["linear"],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    library = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    # Its deprecation warnings are not about this library.
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return library


def their_model(transformers, values):
    """A random network with non-neutral biases and norms."""
    import torch

    torch.manual_seed(0)
    values = json.loads(json.dumps(values))
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    auto = transformers.AutoModelForCausalLM
    if hasattr(config, "vision_config"):
        auto = transformers.AutoModelForImageTextToText
    model = auto.from_config(config, attn_implementation="eager").eval()
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
@pytest.mark.filterwarnings("ignore")  # from torch and transformers
@pytest.mark.parametrize("name", CASES)
def test_logits_and_generation_equal_transformers(name, transformers, tmp_path):
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
    assert kind == CASES[name].get("text_config", CASES[name])["model_type"]
    tensors, offset = loaded.state_dict(), ARCHITECTURES[kind].norm_offset
    for theirs_name, tensor in theirs.state_dict().items():
        if "visual" in theirs_name:
            continue
        # An offset is added and subtracted again.
        away = 1e-7 if offset and "norm" in theirs_name and "linear_attn" not in theirs_name else 0.0
        np.testing.assert_allclose(
            tensors[theirs_name.replace("language_model.", "")].numpy(), tensor.numpy(), rtol=0, atol=away
        )
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
    """Only Gemma's embedding is both tied and scaled, so the file holds the scaled table too."""
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


def random_parameters(config):
    return jax.tree.map(np.asarray, drawn(DecoderLM(config).init, jnp.zeros((1, 1), jnp.int32))["params"])


def test_a_folder_is_written_whole_and_read_back(tmp_path):
    pytest.importorskip("safetensors")
    config = read_config({**LLAMA, "num_hidden_layers": 1, "rope_scaling": SCALINGS["llama3"]})
    assert config.mechanism.rope_scaling == RopeScaling("llama3", 4.0, 16, 1.0, 4.0)
    params = random_parameters(config)
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
    with full_disk(1000), pytest.raises(OSError, match=r"No space left on device|File too large"):
        huggingface.save(tmp_path / "b", config, params)
    assert not list(tmp_path.glob("*b*"))
    values = json.loads((tmp_path / "a" / "config.json").read_text())
    for change, message in (
        ({"num_hidden_layers": 2}, "the weights lack model.layers.1.self_attn.q_proj.weight"),
        ({"intermediate_size": 40}, r"mlp.gate_proj.weight must have the shape \(40, 32\), got \(48, 32\)"),
        ({"num_hidden_layers": 0}, "num_hidden_layers must be at least 1, got 0"),
    ):
        (tmp_path / "a" / "config.json").write_text(json.dumps(values | change))
        with pytest.raises(ValueError, match=message):
            huggingface.load(tmp_path / "a")
    (tmp_path / "a" / "config.json").write_text(json.dumps(values))
    (tmp_path / "a" / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        huggingface.load(tmp_path / "a")


def small(tmp_path, change=None, **options):
    """A configuration and random parameters, and the folder that they are saved in."""
    pytest.importorskip("safetensors")
    config = read_config(LLAMA | {"num_hidden_layers": 1} | (change or {}))
    params = random_parameters(config)
    huggingface.save(tmp_path / "model", config, params, **options)
    return config, params, tmp_path / "model"


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_token_ids_and_generation_survive_a_round_trip(tmp_path):
    _, _, folder = small(tmp_path)
    ours = json.loads((folder / "config.json").read_text())
    # If absent, transformers would use its defaults, which are other tokens.
    assert [ours[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [None] * 3
    assert not (folder / "generation_config.json").exists()
    ids = {"bos_token_id": None, "eos_token_id": [7, 9], "pad_token_id": 3}
    generation = {"eos_token_id": [7, 9], "temperature": 0.6, "transformers_version": "4.57.0"}
    edit(folder / "config.json", **ids)
    (folder / "generation_config.json").write_text(json.dumps(generation))
    config, params = huggingface.load(folder)
    hash(DecoderLM(config))
    huggingface.save(tmp_path / "copy", config, params)
    copied = json.loads((tmp_path / "copy" / "config.json").read_text())
    assert {name: copied[name] for name in ids} == ids
    assert json.loads((tmp_path / "copy" / "generation_config.json").read_text()) == generation


def test_a_separate_table_of_logits_is_kept(tmp_path):
    """transformers 5 reads both tables if config.json ties them but the file holds two different ones."""
    _, params, folder = small(tmp_path)
    edit(folder / "config.json", tie_word_embeddings=True)
    config, loaded = huggingface.load(folder)
    assert not config.tied_embeddings
    np.testing.assert_array_equal(loaded["unembedding"], params["unembedding"])
    numpy = pytest.importorskip("safetensors.numpy")
    tensors = numpy.load_file(folder / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config, loaded = huggingface.load(folder)
    assert config.tied_embeddings
    assert "unembedding" not in loaded


def test_a_network_that_gemma3_does_not_compute_is_not_written_as_gemma3():
    capped = {"model_type": "gemma3_text", **GEMMA, "attn_logit_softcapping": 2.0}
    plain = {"model_type": "gemma3_text", **GEMMA}
    assert meaning(read_config(capped)) == meaning(read_config(plain))
    config = read_config(plain)
    mechanisms = {
        name: dataclasses.replace(getattr(config, name), logits_soft_cap=2.0)
        for name in ("mechanism", "late_mechanism")
        if getattr(config, name) is not None
    }
    with pytest.raises(ValueError, match="no supported architecture"):
        write_config(dataclasses.replace(config, **mechanisms), None)


def test_an_empty_list_of_dense_layers_is_written():
    """transformers 4.57 cannot read null."""
    assert list(write_config(read_config(NEXT), None)[1]["mlp_only_layers"]) == []


def test_yarn_without_an_original_length_takes_the_longest():
    yarn = {"rope_type": "yarn", "factor": 4.0}
    assert read_config(LLAMA | {"rope_scaling": yarn}).mechanism.rope_scaling.original_length == 128


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"rope_theta": None}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": "2"}}, "factor"),
        ({"rope_scaling": SCALINGS["yarn"] | {"truncate": "no"}}, "truncate"),
        ({"rope_parameters": [1]}, "rope_parameters"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps"),
        ({"head_dim": 0}, "head_dim"),
        ({"hidden_act": 3}, "hidden_act"),
        ({"hidden_size": True}, "hidden_size"),
        ({"vocab_size": 10**12}, "vocab_size"),
        ({"attention_bias": 1}, "attention_bias"),
        ({"model_type": "qwen3", "layer_types": 7}, "layer_types"),
        ({"model_type": "qwen2", "max_window_layers": None}, "max_window_layers"),
        ({"model_type": "qwen2", "use_sliding_window": True, "sliding_window": "4"}, "sliding_window"),
        ({"model_type": "gemma3_text", "sliding_window_pattern": 0}, "sliding_window_pattern"),
        ({"model_type": "gemma3_text", "rope_local_base_freq": 0}, "rope_local_base_freq"),
        ({"model_type": "gemma2", "query_pre_attn_scalar": 0}, "query_pre_attn_scalar"),
        (NEXT | {"layer_types": None, "full_attention_interval": 0}, "full_attention_interval"),
        (NEXT | {"num_experts": 4, "decoder_sparse_step": 0}, "decoder_sparse_step"),
        (NEXT | {"mlp_only_layers": 3}, "mlp_only_layers"),
        (NEXT | {"linear_num_key_heads": 0}, "linear_num_key_heads"),
        (NEXT | {"partial_rotary_factor": "half"}, "partial_rotary_factor"),
        ({"is_causal": False}, "is_causal"),
        ({"model_type": "gemma", "use_bidirectional_attention": True}, "use_bidirectional_attention"),
        (OLMO_HYBRID | {"linear_allow_neg_eigval": 1}, "linear_allow_neg_eigval"),
        ({"model_type": "smollm3", "no_rope_layers": [1, "0"]}, "no_rope_layers"),
        ({"model_type": "smollm3", "no_rope_layer_interval": 0}, "no_rope_layer_interval"),
    ],
    ids=str,
)  # fmt: skip
def test_a_field_of_another_type_is_named(change, field):
    with pytest.raises(ValueError, match=rf"config\.json: {field} must be"):
        read_config(LLAMA | change)


def test_shards_that_are_not_the_folders_own(tmp_path):
    numpy = pytest.importorskip("safetensors.numpy")
    _, _, folder = small(tmp_path)
    tensors = numpy.load_file(folder / "model.safetensors")
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    index = folder / "model.safetensors.index.json"
    for name in ("../outside.safetensors", f"{tmp_path}/outside.safetensors", 3, None, []):
        index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, name)}))
        with pytest.raises(ValueError, match=r"index\.json must name files beside it"):
            huggingface.load(folder)
    first, *others = sorted(tensors)
    numpy.save_file({first: tensors[first]}, folder / "a.safetensors")
    numpy.save_file({name: tensors[name] for name in others}, folder / "b.safetensors")
    index.write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "a.safetensors")}))
    with pytest.raises(ValueError, match=r"index\.json names another file for model\.\S+ than holds it"):
        huggingface.load(folder)


def test_weights_in_8_bits_are_named(tmp_path):
    _, _, folder = small(tmp_path)
    data = (folder / "model.safetensors").read_bytes()
    size = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + size])
    values = header["model.norm.weight"]
    start, stop = values["data_offsets"]
    values |= {"dtype": "F8_E4M3", "shape": [stop - start]}
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + data[8 + size :])
    with pytest.raises(ValueError, match=r"model\.norm\.weight is stored as F8_E4M3; weights must be of"):
        huggingface.load(folder)


def test_a_name_on_the_hub_is_not_a_folder():
    with pytest.raises(FileNotFoundError, match=r"path must be a folder on this machine.* 'Qwen/Qwen3-0.6B'"):
        huggingface.load("Qwen/Qwen3-0.6B")


def test_convolutions_cut_elsewhere_and_other_names_of_norms_are_read(tmp_path):
    """transformers cuts OLMo Hybrid's convolutions into thirds, and renames the norms of its other layers too."""
    numpy = pytest.importorskip("safetensors.numpy")
    _, params, folder = small(tmp_path, OLMO_HYBRID)
    tensors = numpy.load_file(folder / "model.safetensors")
    first, full = "model.layers.0", "model.layers.2"
    names = [f"{first}.linear_attn.{part}_conv1d.weight" for part in "qkv"]
    assert [tensors[name].shape for name in names] == [(16, 1, 4), (16, 1, 4), (30, 1, 4)]
    whole = np.concatenate([tensors[name] for name in names])
    tensors |= {name: part.copy() for name, part in zip(names, np.split(whole, [21, 42]))}
    renamed = (
        (f"{first}.attention_layer_norm", f"{first}.input_layernorm"),
        (f"{first}.feedforward_layer_norm", f"{first}.post_attention_layernorm"),
        (f"{full}.post_attention_layernorm", f"{full}.feedforward_layer_norm"),
    )
    for own, other in renamed:
        tensors[f"{other}.weight"] = tensors.pop(f"{own}.weight")
    numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    jax.tree.map(np.testing.assert_array_equal, huggingface.load(folder)[1], params)
    del tensors[names[1]]
    numpy.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"the weights lack {names[1]}"):
        huggingface.load(folder)


def test_a_folder_without_its_files(tmp_path):
    _, _, folder = small(tmp_path)
    weights = folder / "model.safetensors"
    weights.rename(tmp_path / "moved")
    with pytest.raises(
        FileNotFoundError, match=r"no model\.safetensors and no model\.safetensors\.index\.json in"
    ):
        huggingface.load(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"model.norm.weight": "model-00001.safetensors"}}))
    with pytest.raises(
        FileNotFoundError, match=r"index\.json names model-00001\.safetensors, which is missing"
    ):
        huggingface.load(folder)
    (folder / "config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"no config\.json in .*model"):
        huggingface.load(folder)


def test_tensors_of_gated_deltanet_hold_several_parameters():
    """Every tensor of a Qwen3-Next is split into our parameters and reassembled from them."""
    config = read_config(NEXT)
    architecture = architecture_of(NEXT)
    params = random_parameters(config)
    tensors = to_tensors(config, architecture, params)
    first = "model.layers.0.linear_attn"
    # A key head of size 8 with three value heads of size 5: query, key, values and gates.
    assert tensors[f"{first}.in_proj_qkvz.weight"].shape == (2 * (8 + 8 + 15 + 15), 32)
    mixer = params["stack"]["layers_0"]["block_0"]["mixer"]
    projected = tensors[f"{first}.in_proj_qkvz.weight"].reshape(2, 46, 32)
    np.testing.assert_array_equal(projected[1, 8:16].T, mixer["key"]["kernel"][0, :, 1])
    np.testing.assert_array_equal(projected[1, 21:26].T, mixer["value"]["kernel"][0, :, 4])
    np.testing.assert_array_equal(projected[0, 41:46].T, mixer["gate"]["kernel"][0, :, 2])
    again = to_parameters(config, architecture, tensors.__getitem__)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6), again, params)
    assert write_config(config, None)[1]["max_position_embeddings"] == 8192
    _, values = write_config(config, 64)
    assert values["model_type"] == "qwen3_next"
    assert {k: values[k] for k in NEXT if k in values} == {k: NEXT[k] for k in NEXT if k in values} | {
        "max_position_embeddings": 64
    }


def test_the_text_model_of_a_network_of_text_and_images():
    """config.json ties the tables outside text_config, where transformers writes its default."""
    text = QWEN35 | {"tie_word_embeddings": False}
    values = {"model_type": "qwen3_5", "tie_word_embeddings": True, "text_config": text}
    assert text_part(values) == {**QWEN35, "tie_word_embeddings": True}
    with pytest.raises(ValueError, match="text_config must be an object for qwen3_5, got None"):
        text_part({"model_type": "qwen3_5"})
    experts = {"model_type": "qwen3_5_moe", "text_config": {"num_experts": 8}}
    with pytest.raises(ValueError, match="num_experts=8 makes the layers of qwen3_5_moe_text mixtures"):
        read_config(text_part(experts))


GEMMA2, OLMO2 = {"model_type": "gemma2", **GEMMA}, {"model_type": "olmo2", **SMALL}
SMOL = {"model_type": "smollm3", **SMALL, "num_hidden_layers": 5}
SLIDING, FULL = "sliding_attention", "full_attention"
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}


@pytest.mark.parametrize(
    ("values", "change", "message"),
    [
        (NEXT, {"hidden_act": "gelu"}, "hidden_act must be silu with linear_attention layers, got 'gelu'"),
        (NEXT, {"num_experts": 4}, "num_experts=4 makes 6 of 6 layers mixtures of experts"),
        (NEXT, {"num_experts": 4, "mlp_only_layers": [0, 2, 4], "decoder_sparse_step": 3}, "makes 1 of 6 layers"),
        (NEXT, {"attention_bias": True}, "attention_bias must be false with linear_attention layers"),
        (NEXT, {"partial_rotary_factor": 0.05}, "partial_rotary_factor must give an even number of the 24"),
        (NEXT, {"layer_types": [SLIDING] * 6}, "layer_types must be 6 of full_attention, linear_att"),
        (LLAMA, {"model_type": "phi"}, "model_type must be one of llama, mistral, .* got 'phi'"),
        (LLAMA, {"model_type": "gpt_oss", "num_local_experts": 32},
         "num_local_experts=32 makes the layers of gpt_oss mixtures of experts"),
        (LLAMA, {"hidden_act": "quick_gelu"},
         "hidden_act must be one of silu, gelu_pytorch_tanh, gelu, relu, got 'quick_gelu'"),
        (LLAMA, {"num_local_experts": 8}, "num_local_experts=8 is not supported for llama; supported are vocab_size"),
        (LLAMA, {"quantization_config": {"bits": 4}}, "quantization_config=.* is not supported"),
        (LLAMA, {"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type must be one of .* got 'dynamic'"),
        (LLAMA, {"rope_scaling": LONGROPE}, "rope_type must be one of default, .* got 'longrope'"),
        (LLAMA, {"rope_scaling": {"type": "linear"}}, "rope_type linear needs the field factor"),
        (LLAMA, {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor must be 1, got 0.5"),
        (LLAMA, {"hidden_size": None}, "hidden_size must be an integer, got None"),
        (SMOL, {"no_rope_layers": [1]}, "no_rope_layers must have 5 numbers, got 1"),
        (SMOL, {"no_rope_layers": [1, 0, 0, 1, 1]}, r"no_rope_layers \(with layer_types\) must be one kind and then"),
        (SMOL, {"layer_types": [SLIDING] * 5}, "sliding_window must be a number of tokens"),
        (OLMO2, {"clip_qkv": 8.0}, r"clip_qkv=8\.0 is not supported for olmo2"),  # transformers would not read it
        (GEMMA2, {"layer_types": [FULL, SLIDING, SLIDING, FULL, FULL]},
         "layer_types must be one kind and then the other, or repeat"),
    ],
    ids=lambda x: str(x)[:40],
)  # fmt: skip
def test_what_has_no_counterpart_here_is_named(values, change, message):
    with pytest.raises(ValueError, match=message):
        read_config(values | change)


def test_other_forms_of_one_configuration():
    dense = {"num_experts": 4, "mlp_only_layers": [0, 2, 4], "decoder_sparse_step": 7}
    assert meaning(read_config(NEXT | dense)) == meaning(read_config(NEXT))
    # A published form of no positions.
    published = {name: value for name, value in OLMO_HYBRID.items() if name != "rope_parameters"}
    assert meaning(read_config(published | {"rope_theta": None})) == meaning(read_config(OLMO_HYBRID))


@pytest.mark.parametrize(
    ("values", "rotary", "same"),
    [
        # rope_scaling replaces rope_parameters, whose own base is then not read.
        (LLAMA, {"rope_parameters": {"rope_theta": 9.0}, "rope_scaling": SCALINGS["linear"]},
         {"rope_scaling": SCALINGS["linear"]}),
        (NEXT, {"rope_scaling": {"partial_rotary_factor": 0.25, **SCALINGS["linear"]}},
         {"partial_rotary_factor": 0.25, "rope_scaling": SCALINGS["linear"]}),
        (NEXT, {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.25}},
         {"partial_rotary_factor": 0.25}),
        # Without names of kinds, as in other architectures, these parameters are not read.
        ({"model_type": "gemma3_text", **GEMMA}, {"rope_parameters": {"rope_type": "default", "rope_theta": 9.0}}, {}),
    ],
)  # fmt: skip
def test_rotary_fields_count_as_in_transformers(values, rotary, same):
    assert meaning(read_config(values | rotary)) == meaning(read_config(values | same))
    library = pytest.importorskip("transformers")

    def theirs(fields):
        fields = json.loads(json.dumps(values | fields))
        found = library.AutoConfig.for_model(fields.pop("model_type"), **fields).rope_parameters
        return (
            found
            if "full_attention" not in found
            else [found[f"{kind}_attention"] for kind in ("full", "sliding")]
        )

    assert theirs(rotary) == theirs(same)


@pytest.mark.parametrize(
    ("kind", "options", "message"),
    [
        (DecoderConfig, {"mechanism": FullConfig(sinks=True), "norm": "rms", "ffn": "swiglu"},
         r"no supported architecture .* differs in .*sinks|differs in mechanism"),
        # The decoder of an encoder-decoder reads inputs that no file format has.
        (EncoderDecoderConfig,
         {"mechanism": FullConfig(), "norm": "rms", "ffn": "swiglu", "embedding_scale": 1.0},
         "the nearest, llama, differs in cross_attention"),
        # An architecture without such layers is not near, although it differs in nothing else.
        (DecoderConfig, {"mechanism": LocalConfig()}, "the nearest, mistral, differs in norm, embedding_scale"),
    ],
)  # fmt: skip
def test_what_has_no_counterpart_there_is_named(kind, options, message):
    with pytest.raises(ValueError, match=message):
        huggingface.save("unused", kind(**options), {})
