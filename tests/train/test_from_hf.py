"""Training from weights in the layout of transformers: --from_hf."""

import json
import math
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import eval.tasks.export
import eval.tasks.generate
import eval.tasks.lm
import train.lm
from brl_jax.loading import load_run
from brl_jax.models import DecoderLM, huggingface
from eval.harness.runs import open_run
from tests.support.command_lines import last_wins
from tests.support.command_lines import run as command
from tests.support.logs import metrics_lines
from tests.train.pretrained import GENERATION, TEMPLATE, write_model
from train.tasks.lm import LM

pytest.importorskip("safetensors")
pytestmark = pytest.mark.xdist_group("train.from_hf")

SHORT = "--steps 80 --batch 4 --length 32 --eval_every 40 --checkpoint_every 40 --warmup_steps 4 --sample_tokens 0"
RATE = "--learning_rate 1e-2 --eval_tokens 0 --z_loss 1e-4"


def words(text, workdir, *more):
    return last_wins(f"--workdir {workdir} --data {text} {SHORT} {RATE} {' '.join(more)}")


@pytest.fixture(scope="module")
def run(folder, text, tmp_path_factory):
    """A finished run, whose folder of weights is no longer there."""
    workdir, copy = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("copy") / "model"
    shutil.copytree(folder, copy)
    train.lm.main(words(text, workdir, "--from_hf", str(copy)))
    shutil.rmtree(copy)
    return workdir


def test_a_run_starts_from_the_weights_and_learns(run, folder):
    lines = metrics_lines(run)
    config, params = huggingface.load(folder)
    assert lines[-1]["step"] == 80
    assert lines[-1]["val_loss"] < 0.5 < 4 < lines[0]["loss"]
    opened = open_run([LM], str(run), "last")
    mesh = LM.open_mesh(opened.config)
    data = LM.load(opened.config, ("train", "valid"))
    batch = next(iter(LM.training_stream(opened.config, data, mesh)))
    total, weight, _ = DecoderLM(config).apply(
        {"params": params}, batch["tokens"], batch["targets"], z_loss=1e-4, method="loss"
    )
    np.testing.assert_allclose(lines[0]["loss"], total / weight, rtol=1e-5)
    assert opened.config.model.vocab_size == config.vocab_size == 304


@pytest.mark.slow
def test_a_run_needs_its_folder_of_weights_no_more(run, tmp_path, capsys):
    """It is resumed, measured, continued and exported without; the export is read back."""
    copied = tmp_path / "run"
    shutil.copytree(run, copied)
    before = metrics_lines(run)[-1]["val_loss"]
    capsys.readouterr()
    train.lm.main(["--workdir", str(copied)])
    assert "nothing is left to train: the run is at step 80" in capsys.readouterr().err
    eval.tasks.lm.main(["--workdir", str(copied), "--checkpoint", "last"])
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["loss"] == pytest.approx(before, rel=1e-5)
    eval.tasks.generate.main(
        ["--workdir", str(copied), "--prompt", "the colour of the", "--tokens", "4", "--temperature", "0"]
    )
    assert capsys.readouterr().out.startswith("the colour of the")
    line = f"--workdir {copied} --out {tmp_path / 'out'} --layout huggingface --checkpoint last"
    eval.tasks.export.main(line.split())
    out = tmp_path / "out"
    params = huggingface.load(out)[1]
    opened = open_run([LM], str(run), "last")
    jax.tree.map(np.testing.assert_array_equal, params, jax.tree.map(jnp.asarray, opened.params))
    values = json.loads((out / "config.json").read_text())
    assert values["max_position_embeddings"] == 77
    assert values["eos_token_id"] == 2
    assert json.loads((out / "generation_config.json").read_text()) == GENERATION
    assert json.loads((out / "tokenizer_config.json").read_text())["tokenizer_class"] == "Qwen2TokenizerFast"
    # And an export can be trained on.
    capsys.readouterr()
    more = ["--from_hf", str(out), "--steps", "1", "--warmup_steps", "0"]
    train.lm.main(last_wins([*words(opened.config.data.data, tmp_path / "next"), *more]))
    assert metrics_lines(tmp_path / "next")[0]["loss"] < 0.6


@pytest.mark.slow
@pytest.mark.parametrize("more", ["", "--lora_rank 2 --dtype bfloat16 --accumulation 2"])
def test_a_run_goes_on_from_a_checkpoint(folder, text, tmp_path, more):
    whole, again = tmp_path / "whole", tmp_path / "again"
    line = words(text, whole, f"--from_hf {folder} --steps 12 --checkpoint_every 6 {more}")
    with jax.numpy_dtype_promotion("standard"):  # Flax's norms promote bfloat16
        train.lm.main(line)
        shutil.copytree(whole, again)
        shutil.rmtree(again / "checkpoints" / "12")
        (again / "metrics.jsonl").unlink()
        train.lm.main(["--workdir", str(again)])
    lost = [[each["loss"] for each in metrics_lines(place)] for place in (whole, again)]
    assert len(lost[1]) == 6
    assert lost[0][6:] == lost[1]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (
            "--mechanism local",
            "--mechanism has no effect with from_hf, whose config.json describes the network",
        ),
        ("--d_model 64", "--d_model has no effect with from_hf, whose config.json describes the network"),
        ("--tokenizer bytes", "--tokenizer has no effect with from_hf, which has a tokenizer"),
        ("--lora_rank 2 --optimizer muon", "--optimizer must be 'adamw' with lora_rank, got 'muon'"),
        ("--lora_alpha 2", "--lora_alpha has no effect with lora_rank 0"),
        ("--from_hf {new}", "--from_hf: path must be a folder on this machine"),
        ("--from_hf {empty}", "--from_hf: no config.json in {empty}"),
        ("--from_hf {cut}", "--from_hf: {cut}/model.safetensors is damaged: "),
        ("--from_hf {torn}", "--from_hf: {torn}/config.json is not JSON: "),
        ("--from_hf {mute}", "--from_hf: {mute} has no tokenizer.json and no tokenizer.model"),
        ("--from_hf {small}", "--from_hf: the tokenizer has 287 tokens, and the network's embedding has 100"),
        ("--from_hf {moe}", "config.json: model_type must be one of"),
    ],
)
def test_bad_input_is_a_line_and_status_2(folder, text, tmp_path, monkeypatch, capsys, more, expected):
    places = {name: tmp_path / name for name in ("new", "empty", "mute", "small", "moe", "cut", "torn")}
    for name in ("mute", "moe", "cut", "torn"):
        shutil.copytree(folder, places[name])
    places["empty"].mkdir()
    (places["mute"] / "tokenizer.json").unlink()
    (places["moe"] / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    (places["cut"] / "model.safetensors").write_bytes(b"damaged")
    (places["torn"] / "config.json").write_text("{")
    write_model(places["small"], folder, vocab_size=100)
    line = words(text, tmp_path / "run", "--from_hf", str(folder), *more.format(**places).split())
    status, err = command("train.lm", line, monkeypatch, capsys)
    assert (status, err.count("\n")) == (2, 1), err
    assert expected.format(**places) in err
    assert not (tmp_path / "run" / "config.json").exists()


def test_weights_go_where_the_parameters_are(folder):
    config, expected = huggingface.load(folder)
    assert huggingface.load_config(folder) == config
    fresh = jax.tree.map(lambda x: jnp.full_like(x, math.nan), expected)
    got = huggingface.load_onto(fresh, folder)
    jax.tree.map(np.testing.assert_array_equal, got, expected)
    with pytest.raises(ValueError, match="params must be of the network that"):
        huggingface.load_onto({"embedding": expected["embedding"]}, folder)


def flat(params):
    return {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # from torch and transformers
def test_low_rank_changes_alone_are_trained(folder, text, tmp_path, capsys):
    """They learn the text, the folder's weights stay as they are, and the export has both together."""
    workdir, out = tmp_path / "run", tmp_path / "out"
    more = f"--from_hf {folder} --lora_rank 4 --lora_alpha 32 --accumulation 2 --weight_decay 0"
    train.lm.main(words(text, workdir, *more.split()))
    shown = capsys.readouterr().err
    lines = metrics_lines(workdir)
    assert lines[-1]["val_loss"] < 1.5 < 4 < lines[0]["loss"]
    run = open_run([LM], str(workdir), "last")
    weights, got = flat(huggingface.load(folder)[1]), flat(run.params)
    for name, value in weights.items():
        np.testing.assert_array_equal(got.pop(name), value)
    assert len(got) == 2 * 7
    assert all(np.abs(value).max() > 0 for value in got.values())
    trained = sum(value.size for value in got.values())
    assert f"{trained + sum(x.size for x in weights.values()):,} parameters, {trained:,} of them" in shown
    state = read_rest(workdir, 80)
    moments = [x for x in jax.tree.leaves(state["opt_state"]) if x.ndim]
    assert sum(x.size for x in moments) == 2 * trained
    eval.tasks.export.main(["--workdir", str(workdir), "--out", str(out), "--checkpoint", "last"])
    config, merged = huggingface.load(out)
    tokens = np.arange(16, dtype=np.int32)[None]
    want = run.model.apply({"params": run.params}, tokens)[0]
    np.testing.assert_allclose(DecoderLM(config).apply({"params": merged}, tokens)[0], want, atol=1e-4)
    loaded = load_run(workdir, "last")
    np.testing.assert_array_equal(loaded.model.apply(loaded.variables, tokens)[0], want)
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out)(torch.tensor(tokens))
    np.testing.assert_allclose(theirs.logits.detach().numpy(), want, atol=1e-4)


def read_rest(workdir, step):
    """What a checkpoint holds in addition to the parameters."""
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as checkpointer:
        return checkpointer.restore(
            workdir / "checkpoints" / str(step), args=ocp.args.Composite(rest=ocp.args.StandardRestore())
        )["rest"]


COLOURS = {"sky": "blue", "grass": "green", "coal": "black", "snow": "white"}


def chats(place):
    """Questions and answers, a quarter of them held out."""
    lines = [
        {"messages": [{"role": "user", "content": thing}, {"role": "assistant", "content": colour}]}
        for thing, colour in COLOURS.items()
    ]
    lines += [{"prompt": thing, "completion": colour} for thing, colour in COLOURS.items()] * 2
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return f"jsonl:{place}"


@pytest.mark.slow
def test_a_small_set_of_chats_is_learnt(folder, tmp_path, capsys):
    """Its questions get the answers, and the template goes with the export."""
    workdir = tmp_path / "run"
    train.lm.main(
        words(chats(tmp_path / "chats.jsonl"), workdir, "--from_hf", str(folder), "--holdout", "0.34")
    )
    lines = metrics_lines(workdir)
    assert lines[-1]["val_loss"] < 0.1 < 3 < lines[0]["loss"]
    capsys.readouterr()
    prompts = {
        f"<|im_start|>user\n{thing}<|im_end|>\n<|im_start|>assistant\n": colour
        for thing, colour in COLOURS.items()
    }
    ask = ["--tokens", "8", "--temperature", "0", "--stop", "<|im_end|>"]
    ask += [word for prompt in prompts for word in ("--prompt", prompt)]
    eval.tasks.generate.main(["--workdir", str(workdir), *ask])
    out = capsys.readouterr().out
    for i, (prompt, colour) in enumerate(prompts.items()):
        assert f"--- {i + 1} of 4\n{prompt}{colour}<|im_end|>\n" in out
    eval.tasks.lm.main(["--workdir", str(workdir)])
    measured = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert measured["bits_per_byte"] < 0.2
    eval.tasks.export.main(["--workdir", str(workdir), "--out", str(tmp_path / "out")])
    stored = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert stored["chat_template"] == TEMPLATE
