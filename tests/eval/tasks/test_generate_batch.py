"""`eval.generate --batch`: the file of prompts, the file of continuations, and resuming after a stop."""

import errno
import json
import os
import sys

import jax.numpy as jnp
import pytest

import eval.tasks.generate
import eval.tasks.generate_batch
from brl_jax import CosformerConfig, DecoderConfig, DecoderLM, LocalConfig
from tests.support.parameters import drawn
from train.cli.command import command
from train.data.tokenizers.named import BytesTokenizer
from train.engine.errors import UserError

SIZES = {"num_layers": 1, "d_model": 16, "num_heads": 2, "d_ff": 16, "vocab_size": 256}
MODEL = DecoderLM(DecoderConfig(mechanism=LocalConfig(window=4), **SIZES))
PROMPTS = [{"prompt": "one"}, {"prompt": "thirteen", "max_tokens": 2, "id": "b"}, {"prompt": "t", "id": [3]}]


@pytest.fixture(scope="module")
def params():
    return drawn(MODEL.init, jnp.zeros((1, 1), jnp.int32))["params"]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


def generate(params, folder, **changes):
    call = {
        "batch": folder / "in.jsonl",
        "out": folder / "out.jsonl",
        "max_tokens": 5,
        "slots": 2,
        "seed": 0,
        "sampling": {"temperature": changes.pop("temperature", 0.0)},
        "run": "x",
    }
    eval.tasks.generate_batch.generate_file(MODEL, params, BytesTokenizer(), **call | changes)
    return [json.loads(line) for line in (folder / "out.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_a_file_of_prompts(params, tmp_path, capsys, monkeypatch):
    write(tmp_path / "in.jsonl", PROMPTS)
    rows = generate(params, tmp_path)
    assert [(row["id"], row["prompt"], row["tokens"]) for row in rows] == [
        (1, "one", 5),
        ("b", "thirteen", 2),
        ([3], "t", 5),
    ]
    assert all(set(row) == {"id", "prompt", "text", "tokens", "finish_reason"} for row in rows)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("out")] == ["out.jsonl"]
    assert "12 tokens in" in capsys.readouterr().err
    with pytest.raises(UserError, match=r"--out: .*out.jsonl exists"):
        generate(params, tmp_path)

    # Stopped twice after a prompt, once in the middle of a line, it resumes with the remaining ones.
    whole = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    original = eval.tasks.generate_batch.generate_requests

    def stops(*args, **kwargs):
        yield next(original(*args, **kwargs))
        raise KeyboardInterrupt

    monkeypatch.setattr(eval.tasks.generate_batch, "generate_requests", stops)
    with pytest.raises(KeyboardInterrupt):
        generate(params, tmp_path)
    monkeypatch.setattr(eval.tasks.generate_batch, "generate_requests", original)
    (part,) = tmp_path.glob("out.jsonl.*.part")
    assert len(part.read_text().splitlines()) == 2
    assert not (tmp_path / "out.jsonl").exists()
    with part.open("a") as file:
        file.write('{"line": 2, "te')
    other = write(tmp_path / "out.jsonl.other.part", [{"line": 0}])
    (tmp_path / "out.jsonl.link.part").symlink_to(other)
    before = other.read_bytes()
    monkeypatch.setattr(eval.tasks.generate_batch, "generate_requests", stops)
    with pytest.raises(KeyboardInterrupt):
        generate(params, tmp_path)
    assert "1 of 3 prompts are done" in capsys.readouterr().err
    monkeypatch.setattr(eval.tasks.generate_batch, "generate_requests", original)
    generate(params, tmp_path)
    assert (tmp_path / "out.jsonl").read_bytes() == whole
    assert not part.exists()
    assert other.read_bytes() == before
    assert sorted(tmp_path.glob("out*.part")) == [tmp_path / f"out.jsonl.{x}.part" for x in ("link", "other")]
    assert "2 of 3 prompts are done" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "in.jsonl:2 is not JSON"),
        ("[1]", "in.jsonl:2 must be an object"),
        ('{"prompt": 1}', "in.jsonl:2: prompt must be a string, got 1"),
        ('{"id": 1}', "in.jsonl:2: prompt is missing"),
        ('{"prompt": "a\\ud800"}', "in.jsonl:2 has half a surrogate pair"),
        ('{"prompt": "a", "id": "\\ud800"}', "in.jsonl:2 has half a surrogate pair"),
        ('{"prompt": "a", "id": NaN}', "in.jsonl:2 is not JSON: NaN is not a finite number"),
        ('{"prompt": ""}', "in.jsonl:2: expected at least one token of text, got ''"),
        ('{"prompt": "a", "max_tokens": 0}', "in.jsonl:2: max_tokens must be at least 1, got 0"),
        ('{"prompt": "a", "max_tokens": 1.5}', "in.jsonl:2: max_tokens must be an integer, got 1.5"),
        ('{"prompt": "a", "tokens": 3}', "in.jsonl:2: unknown key 'tokens'; expected prompt, max_tokens, id"),
    ],
)
def test_bad_lines(params, tmp_path, monkeypatch, capsys, line, message):
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    monkeypatch.setattr(sys, "argv", ["eval.generate"])
    with pytest.raises(UserError, match=message):
        generate(params, tmp_path)
    assert command(lambda argv: generate(params, tmp_path), "eval.generate") == 2
    assert "in.jsonl:2" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_the_file_of_a_prompt_is_read_as_training_text_is(tmp_path):
    """The text keeps its line ends and loses a byte order mark."""
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfa\r\nb\n")
    options = eval.tasks.generate.GenerateOptions(prompt_file=str(tmp_path / "prompt.txt"))
    assert eval.tasks.generate._prompts(options) == [("--prompt_file", "a\r\nb\n")]


def test_a_prompt_beyond_the_mechanisms_length(tmp_path, monkeypatch):
    model = DecoderLM(DecoderConfig(mechanism=CosformerConfig(max_length=6), **SIZES))
    monkeypatch.setattr(sys.modules[__name__], "MODEL", model)
    write(tmp_path / "in.jsonl", PROMPTS)
    with pytest.raises(UserError, match="--tokens, --batch: max_length=6 of the cosformer mechanism"):
        generate({}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_a_full_disk(tmp_path, monkeypatch):
    def full(file, row):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(eval.tasks.generate_batch, "_append", full)
    write(tmp_path / "in.jsonl", PROMPTS)
    with pytest.raises(UserError, match=r"--out: cannot write .*out.jsonl: No space left on device"):
        generate({}, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


def test_no_prompts(params, tmp_path):
    (tmp_path / "in.jsonl").write_text("\n")
    with pytest.raises(UserError, match=r"--batch: expected a prompt in .*in.jsonl, got none"):
        generate(params, tmp_path)
    with pytest.raises(UserError, match=r"--batch: cannot read .*none.jsonl"):
        generate(params, tmp_path, batch=tmp_path / "none.jsonl")
