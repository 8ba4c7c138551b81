"""One line reads a run's exported network and tokenizer."""

import json

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import eval.tasks.export
import train.lm
from brl_jax.configuration import to_json
from brl_jax.layers import MECHANISMS
from brl_jax.loading import load_export, save_export
from brl_jax.models import DecoderConfig, DecoderLM, huggingface
from eval.harness.runs import open_run
from tests.support.command_lines import last_wins
from tests.support.texts import write_splits
from train.data.tokenizers.named import load_tokenizer
from train.engine.errors import UserError
from train.tasks.lm import LM

LINE = (
    "--steps 1 --batch 2 --length 16 --num_layers 2 --d_model 16 --num_heads 2 --d_ff 16 --tensorboard False "
    "--sample_tokens 0"
)


def exported(tmp_path, capsys, options, dtype="float32"):
    """The run in the folder `out`, its parameters, and what the command printed."""
    text = write_splits(tmp_path, "alpha beta gamma " * 40)
    train.lm.main(last_wins(f"--data {text} --workdir {tmp_path}/run {LINE} {options}"))
    line = f"--workdir {tmp_path}/run --out {tmp_path}/out --dtype {dtype}"
    eval.tasks.export.main(line.split())
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    _, _, model, params, step = open_run([LM], f"{tmp_path}/run", "best")
    assert printed["step"] == step == 1
    assert printed["parameters"] == sum(leaf.size for leaf in jax.tree.leaves(params))
    own, read = (load_tokenizer(tmp_path / name).encode("alpha").tolist() for name in ("run", "out"))
    assert own == read
    return load_export(tmp_path / "out"), model, params, printed["layout"]


def check_logits(loaded, model, params):
    tokens = np.arange(12, dtype=np.int32)[None]
    want = model.apply({"params": params}, tokens)[0]
    np.testing.assert_allclose(loaded.model.apply(loaded.variables, tokens)[0], want, rtol=1e-5, atol=1e-5)


def test_a_folder_of_parameters(tmp_path):
    pytest.importorskip("safetensors")
    config = DecoderConfig(num_layers=2, d_model=8, num_heads=2, d_ff=8, mechanism=MECHANISMS["linear"]())
    shapes = jax.eval_shape(DecoderLM(config).init, jax.random.key(0), jax.ShapeDtypeStruct((1, 1), "int32"))
    random = np.random.default_rng(0)
    params = jax.tree.map(lambda x: random.normal(size=x.shape).astype(np.float32), shapes)["params"]
    values = {"network": "DecoderLM", "model": to_json(config)}
    save_export(tmp_path / "out", params, values, step=7, dtype="bfloat16")
    loaded = load_export(tmp_path / "out")
    assert (loaded.model.config, loaded.step) == (config, 7)
    jax.tree.map(
        lambda got, want: np.testing.assert_array_equal(got, want.astype(got.dtype), strict=True),
        loaded.variables["params"],
        jax.tree.map(lambda x: x.astype(jnp.bfloat16).astype(np.float32), nn.unbox(params)),
    )
    values["model"]["num_layers"] = 3
    (tmp_path / "out" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"must have the shape \(3, .* got \(2, "):
        load_export(tmp_path / "out")
    values["model"]["norm"] = "rms"
    values["model"]["use_bias"] = True
    (tmp_path / "out" / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"do not match config\.json: stack"):
        load_export(tmp_path / "out")


def test_a_network_that_nobody_reads_is_not_written(tmp_path):
    with pytest.raises(ValueError, match=r"network must be one of DecoderLM, .* got 'NodeClassifier'"):
        save_export(tmp_path / "out", {}, {"network": "NodeClassifier", "model": {}}, step=7)
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_a_network_without_a_counterpart(tmp_path, capsys):
    pytest.importorskip("safetensors")
    loaded, model, params, layout = exported(tmp_path, capsys, "--mechanism linear")
    assert (layout, loaded.step) == ("own", 1)
    assert loaded.config == json.loads((tmp_path / "run" / "config.json").read_text())
    jax.tree.map(np.testing.assert_array_equal, loaded.variables["params"], params)
    check_logits(loaded, model, params)
    line = f"--workdir {tmp_path}/run --out {tmp_path}/out"
    with pytest.raises(UserError, match=r"--out: .*out exists and is not empty"):
        eval.tasks.export.main(line.split())
    with pytest.raises(
        UserError, match=r"^--layout: no supported architecture of transformers .* computes this"
    ):
        eval.tasks.export.main(f"{line}2 --layout huggingface".split())
    assert not (tmp_path / "out2").exists()


@pytest.mark.slow
def test_a_network_of_transformers(tmp_path, capsys):
    pytest.importorskip("safetensors")
    options = "--mechanism local --mechanism.window 8 --norm rms --ffn swiglu --tokenizer bpe:270"
    loaded, model, params, layout = exported(tmp_path, capsys, options)
    assert layout == "mistral"
    check_logits(loaded, model, params)
    config, _ = huggingface.load(tmp_path / "out")
    assert config.mechanism.window == 8
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")
    assert (
        tokenizer("alpha beta")["input_ids"] == load_tokenizer(tmp_path / "run").encode("alpha beta").tolist()
    )
