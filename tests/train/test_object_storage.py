"""Runs whose folder and data are in object storage, with an emulator on the loopback interface and real processes."""

import json

import fsspec
import numpy as np
import pytest
from etils import epath

import train.lm
from eval.harness.runs import open_run
from tests.support.processes import python
from tests.support.texts import write_splits
from tests.train.object_store import BUCKET, ObjectStore
from train.data.sources import open_source
from train.engine.errors import UserError
from train.engine.metrics import MetricsLog
from train.engine.storage import Mirror, check_client

TINY = (
    "--batch 4 --length 16 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 --mechanism local "
    "--mechanism.window 4 --eval_every 4 --eval_tokens 200 --checkpoint_every 2 --warmup_steps 2 --sample_tokens 5 "
    "--decay constant"
)


def _text(count):
    rng = np.random.default_rng(0)
    words = ["alpha", "beta", "gamma", "delta", "epsilon"]
    return "\n".join(" ".join(rng.choice(words, size=6)) for _ in range(count)) + "\n"


def _losses(content):
    lines = [json.loads(line) for line in content.splitlines()]
    return [(line["step"], line["loss"], line.get("val_loss")) for line in lines]


@pytest.fixture
def store():
    pytest.importorskip("gcsfs")
    pytest.importorskip("gcp_storage_emulator")
    made = ObjectStore()
    made.write("text/train.txt", _text(100).encode())
    made.write("text/valid.txt", _text(15).encode())
    yield made
    made.close()


@pytest.fixture
def train_lm(store, tmp_path):
    """Starts a run on a "machine": a process with a separate home folder."""

    def start(machine, workdir, *more, text=f"text:gs://{BUCKET}/text/*.txt"):
        line = f"-m train.lm {TINY} --workdir {workdir} --data {text}"
        (tmp_path / machine).mkdir(exist_ok=True)
        cache = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled")}
        return python(*line.split(), *more, HOME=str(tmp_path / machine), **store.environment, **cache)

    return start


@pytest.fixture
def expected(train_lm, tmp_path):
    """The losses of the same run without a bucket or a move."""
    text = write_splits(tmp_path / "text", train=_text(100), valid=_text(15))
    done = train_lm("local", tmp_path / "run", "--steps", "8", text=text)
    assert done.returncode == 0, done.stderr
    return _losses((tmp_path / "run" / "metrics.jsonl").read_text())


@pytest.mark.slow
def test_a_run_in_a_bucket_goes_on_on_another_machine(store, train_lm, expected, tmp_path):
    """Bit for bit, from a slow store. The text has been deleted, but its tokens are in the bucket."""
    workdir = f"gs://{BUCKET}/runs/one"
    first = train_lm("first", workdir, "--steps", "5")
    assert first.returncode == 0, first.stderr
    assert "next: python -m eval.lm --workdir gs://bucket/runs/one" in first.stderr
    for name in ("text/train.txt", "text/valid.txt"):
        store.delete(name)
    store.delay = 0.02
    second = train_lm("second", workdir, "--steps", "8")
    assert second.returncode == 0, second.stderr
    assert "resuming from step 5 of 8" in second.stderr
    assert "Traceback" not in first.stderr + second.stderr
    assert [loss[:2] for loss in _losses(store.read("runs/one/metrics.jsonl"))] == [
        loss[:2] for loss in expected
    ]
    names = store.names()
    for file in ("config.json", "data.json", "tokenizer_config.json"):
        assert f"runs/one/{file}" in names
    assert sum("events.out.tfevents" in name for name in names) == 2
    assert not list((tmp_path / "second" / ".cache" / "brl-jax" / "unsent").rglob("metrics.jsonl"))
    line = f"-m eval.lm --workdir {workdir} --split valid"
    evaluated = python(*line.split(), HOME=str(tmp_path / "third"), **store.environment)
    assert evaluated.returncode == 0, evaluated.stderr
    assert json.loads(evaluated.stdout)["loss"] == pytest.approx(expected[-1][2], rel=1e-5)


@pytest.mark.slow
def test_a_missing_bucket_is_a_one_line_error(train_lm):
    done = train_lm("first", "gs://another-bucket/runs/four", "--steps", "2")
    assert done.returncode == 2, done.stderr
    assert done.stderr.count("\n") == 1, done.stderr
    assert "another-bucket" in done.stderr


def test_a_store_that_does_not_answer_is_a_line_within_seconds(store, monkeypatch):
    """Its client would try for more than a minute."""
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("train.engine.storage._ANSWER_SECONDS", 1)
    store.delay = 5.0
    with pytest.raises(
        UserError, match=r"^--workdir: gs://bucket/runs/one cannot be reached: no answer within 1 "
    ):
        check_client("--workdir", "gs://bucket/runs/one")
    with pytest.raises(
        UserError, match=r"^--data: cannot read gs://bucket/\*.txt: no answer within 1 seconds$"
    ):
        open_source("text:gs://bucket/*.txt", 0.2)


def test_metrics_that_the_store_did_not_take_are_kept_and_sent_by_the_next_process(tmp_path, monkeypatch):
    """A local folder plays the bucket; a file at its path refuses every write."""
    monkeypatch.setattr("train.engine.storage.user_cache", lambda: tmp_path / "home")
    monkeypatch.setattr("train.engine.metrics.is_remote", lambda path: True)
    bucket, lines = tmp_path / "bucket", []
    monkeypatch.setattr("train.engine.metrics.log", lines.append)
    first = MetricsLog(bucket, last_step=0, tensorboard=True)
    first.write({"step": 1, "loss": 2.0})
    assert first.sync()
    assert (bucket / "metrics.jsonl").read_text() == '{"step": 1, "loss": 2.0}\n'
    for step in (2, 3):
        bucket.rename(tmp_path / "aside")
        bucket.write_text("")
        first.write({"step": step, "loss": 1.0})
        assert not first.sync()
        assert not first.sync()
        if step == 3:
            first.close()
        bucket.unlink()
        (tmp_path / "aside").rename(bucket)
        assert step == 3 or first.sync()
    second = MetricsLog(bucket, last_step=3, tensorboard=False)
    second.write({"step": 4, "loss": 0.5})
    second.close()
    steps = [json.loads(line)["step"] for line in (bucket / "metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4]
    assert [line.startswith(f"cannot write under {bucket}: ") for line in lines] == [True, False, True]
    assert lines[1] == f"{bucket} answers again and has all metrics"
    assert str(tmp_path / "home") in lines[0]


def test_what_grows_is_copied_in_the_background(tmp_path, monkeypatch):
    monkeypatch.setattr("train.engine.storage.user_cache", lambda: tmp_path / "home")
    mirror = Mirror(epath.Path(tmp_path / "bucket"), print, seconds=0.01)
    (mirror.folder / "metrics.jsonl").write_text("one\n")
    while not (tmp_path / "bucket" / "metrics.jsonl").exists():
        pass
    mirror.close()
    assert not list(mirror.folder.iterdir())


def test_text_from_any_address_is_the_text_of_its_files(tmp_path):
    """fsspec's in-memory store plays the bucket."""
    memory = fsspec.filesystem("memory")
    for name, count in (("a.txt", 40), ("b.txt", 30)):
        (tmp_path / name).write_text(_text(count))
        memory.pipe_file(f"/texts/{name}", _text(count).encode())
    remote = open_source("text:memory://texts/*.txt", 0.2).splits
    local = open_source(f"text:{tmp_path}/*.txt", 0.2).splits
    for split in ("train", "valid"):
        assert b"".join(remote[split].blocks()) == b"".join(local[split].blocks())
    with pytest.raises(UserError, match=r"--data: no file matches 'memory://texts/\*.gz'$"):
        open_source("text:memory://texts/*.gz", 0.2)


def test_a_bucket_without_its_client_is_a_line(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_client("--workdir", "/a/local/folder")
    with pytest.raises(
        UserError, match=r"^--workdir must be a local folder or gs://BUCKET/FOLDER, got 's3://b/r'$"
    ):
        open_run([], "s3://b/r", "best")
    for steps in ((), ("--steps", "3")):
        with pytest.raises(UserError, match=r"--workdir: gs://b/r needs gcsfs: pip install -e '\.\[gcs\]'"):
            train.lm.main(["--workdir", "gs://b/r", *steps])
