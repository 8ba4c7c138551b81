"""Images, texts and pairs from TensorFlow Datasets (mocked) and from files, and one-line errors for bad input."""

import gzip
import json
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.support.prepared import write_info
from tests.support.texts import damage, write
from train.data.lra.tasks import LraDataConfig, load
from train.engine.errors import UserError

SPLITS = ("train", "valid", "test")


def read(tmp_path, task, folder, splits=SPLITS, **changes):
    config = LraDataConfig(**({"task": task, "data_dir": folder and str(folder), "length": 2000} | changes))
    return load(config, tmp_path / "run", splits)


# --- TensorFlow Datasets ---


@pytest.mark.parametrize(("task", "name"), [("image", "cifar10"), ("text", "imdb_reviews")])
def test_tfds(task, name, tmp_path):
    builder = tfds.builder(name, data_dir=tmp_path, file_format="array_record")
    write_info(builder, None, Path(builder.data_dir), {"train": range(30), "test": range(20)})
    with tfds.testing.mock_data(num_examples=30, data_dir=str(tmp_path)):
        source, found = read(tmp_path, task, None, length=1024)
    assert source.name == f"tfds:{name}"
    assert [len(found[split]) for split in SPLITS] == [27, 3, 30]
    if task == "image":
        assert set(found["train"].lengths[:, 0]) == {1024}
    assert found["train"].labels.max() < (10 if task == "image" else 2)
    with (
        mock.patch("tensorflow_datasets.data_source", side_effect=OSError("no network")),
        pytest.raises(UserError, match=rf"--data_dir \(none, so tfds:{name}\): no network"),
    ):
        read(tmp_path, task, None)


# --- images ---


def images(count=40, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(256, size=(count, 32, 32), dtype=np.uint8), rng.integers(10, size=count)


def test_npz(tmp_path):
    (train, labels), (test, test_labels) = images(), images(7, 1)
    np.savez(tmp_path / "x.npz", x_train=train, y_train=labels, x_test=test, y_test=test_labels)
    for folder in (tmp_path, tmp_path / "x.npz"):
        _, found = read(tmp_path, "image", folder)
        assert [len(found[split]) for split in SPLITS] == [36, 4, 7]
        assert bytes(found["valid"][1][0]) == train[19].tobytes()
        assert found["valid"].labels[1] == labels[19]
        assert found["test"].labels.tolist() == test_labels.tolist()


def test_colours_become_grey(tmp_path):
    colours = np.zeros((10, 32, 32, 3), np.uint8)
    colours[0] = (100, 200, 50)
    colours[1] = 255
    arrays = {
        "x_train": colours,
        "y_train": np.zeros((10, 1), int),
        "x_test": colours,
        "y_test": np.zeros(10, int),
    }
    np.savez(tmp_path / "x.npz", **arrays)
    _, found = read(tmp_path, "image", tmp_path)
    # The weights of TensorFlow's rgb_to_grayscale.
    assert set(found["train"][0][0]) == {int((0.2989 * 100 + 0.587 * 200 + 0.114 * 50) * 255.5 / 255)}
    assert set(found["train"][1][0]) == {255}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"x_train": np.zeros((4, 28, 28), np.uint8)},
            r"expected uint8 images of 32 x 32 \(x 3\), got uint8 \(28, 28\)",
        ),
        ({"x_train": np.zeros((4, 32, 32))}, r"got float64 \(32, 32\)"),
        ({"y_train": np.array([0, 1, 10, 2])}, "train: expected labels of 0 to 9, got 10"),
        ({"y_train": np.array([0, 1, 2])}, "4 images and 3 labels; expected the same number"),
        (
            {"y_train": np.array(["cat", "dog"] * 2)},
            "expected a whole number as the label .*, got an array of <U3",
        ),
        (
            {"y_train": np.linspace(0, 1, 4)},
            "expected a whole number as the label .*, got an array of float64",
        ),
        ({"y_train": np.zeros((4, 10), int)}, r"and shape \(4, 10\)"),
    ],
)
def test_bad_arrays(tmp_path, changes, message):
    arrays = {"x_train": np.zeros((4, 32, 32), np.uint8), "y_train": np.zeros(4, int)}
    np.savez(tmp_path / "x.npz", **(arrays | changes))
    with pytest.raises(UserError, match=rf"^--data_dir: .*{message}"):
        read(tmp_path, "image", tmp_path)
    assert not [path for path in (tmp_path / "run").rglob("*") if path.is_file()]


def test_bad_npz_files(tmp_path):
    np.savez(tmp_path / "x.npz", x_train=np.zeros((4, 32, 32), np.uint8))
    with pytest.raises(UserError, match=r"x\.npz has no y_train, only x_train"):
        read(tmp_path, "image", tmp_path)
    (tmp_path / "x.npz").write_bytes((tmp_path / "x.npz").read_bytes()[:200])
    with pytest.raises(UserError, match=r"cannot read .*x\.npz \(truncated\?\)"):
        read(tmp_path, "image", tmp_path)
    arrays = {name: np.zeros((4, 32, 32), np.uint8) for name in ("x_train", "y_train")}
    np.savez_compressed(tmp_path / "x.npz", **arrays)
    damage(tmp_path / "x.npz")
    with pytest.raises(UserError, match=r"cannot read .*x\.npz \(truncated\?\): .*invalid block type"):
        read(tmp_path, "image", tmp_path)
    np.save(tmp_path / "x.npy", np.zeros(4))
    (tmp_path / "x.npy").rename(tmp_path / "x.npz")
    with pytest.raises(UserError, match=r"cannot read .*x\.npz"):
        read(tmp_path, "image", tmp_path)
    (tmp_path / "y.npz").write_bytes(b"")
    with pytest.raises(UserError, match=r"expected one \.npz file in .*, got x\.npz, y\.npz"):
        read(tmp_path, "image", tmp_path)


# --- texts ---


def rows(count, split):
    return [json.dumps({"text": f"{split} {i} é", "label": i % 2}) for i in range(count)]


@pytest.mark.parametrize("names", [("train.jsonl", "test.jsonl"), ("train.jsonl.gz", "test.jsonl")])
def test_jsonl(tmp_path, names):
    for name, split, count in zip(names, ("train", "test"), (20, 6)):
        write(tmp_path / name, "\n".join(rows(count, split)).encode())
    _, found = read(tmp_path, "text", tmp_path)
    # One of each class, although they alternate.
    assert [bytes(found["valid"][i][0]).decode() for i in range(2)] == ["train 18 é", "train 19 é"]
    assert found["train"].labels.tolist() == [i % 2 for i in range(18)]
    assert len(found["test"]) == 6


def test_the_releases_reviews(tmp_path):
    for split in ("train", "test"):
        for label in ("pos", "neg"):
            (tmp_path / "aclImdb" / split / label).mkdir(parents=True)
            for i in range(10):
                # The classes alternate by file name, as in the release.
                stars = 7 if label == "pos" else 2
                (tmp_path / "aclImdb" / split / label / f"{i}_{stars}.txt").write_text(f"{label} {i}")
    for folder in (tmp_path, tmp_path / "aclImdb"):
        _, found = read(tmp_path, "text", folder)
        assert [len(found[split]) for split in SPLITS] == [18, 2, 20]
        assert sorted(found["valid"].labels.tolist()) == [0, 1]
        for sequence, label in zip(found["test"], found["test"].labels):
            assert bytes(sequence[0]).startswith(b"pos" if label else b"neg")
    for path in (tmp_path / "aclImdb" / "test" / "neg").iterdir():
        path.unlink()
    with pytest.raises(UserError, match=r"expected \.txt files in .*test/pos and .*test/neg"):
        read(tmp_path, "text", tmp_path)


def test_long_texts_are_cut_and_counted(tmp_path, capsys):
    for split in ("train", "test"):
        lines = [json.dumps({"text": "abcdefghij" * n, "label": 0}) for n in (0, 1, 2, 3)]
        (tmp_path / f"{split}.jsonl").write_text("\n".join(lines))
    for _ in range(2):  # the second time from the cache
        _, found = read(tmp_path, "text", tmp_path, ("train",), length=15)
        assert found["train"].truncated == 2
        assert [bytes(row[0]) for row in found["train"]] == [b" ", b"abcdefghij", *[b"abcdefghijabcde"] * 2]
        assert "train: 2 of 4 sequences were longer than 15: cut" in capsys.readouterr().err
    assert len(read(tmp_path, "text", tmp_path, ("train",), length=15, train_examples=2)[1]["train"]) == 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            '{"text": "a", "lab',
            r"train\.jsonl, line 2: expected an object with .*: the line is not JSON: Unterminated string",
        ),
        pytest.param(
            "[" * 100_000,
            "line 2: expected an object with .*: the line is not JSON: nested too deep",
            id="nested",
        ),
        ('{"text": "a"}', 'line 2: expected an object with a "text" and a "label" from 0 on'),
        ('{"text": 3, "label": 1}', "line 2: expected an object"),
        ('{"text": "a", "label": 2}', "train: expected labels of 0 to 1, got 2"),
    ],
)
def test_bad_json(tmp_path, line, message):
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(rows(1, split)[0] + "\n" + line + "\n")
    with pytest.raises(UserError, match=message):
        read(tmp_path, "text", tmp_path)


def test_damaged_and_missing_files(tmp_path):
    content = gzip.compress("\n".join(rows(500, "train")).encode())
    (tmp_path / "train.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"expected .*test\.jsonl or test\.jsonl\.gz; there is neither"):
        read(tmp_path, "text", tmp_path)
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl.gz").write_bytes(content[: len(content) // 2])
    with pytest.raises(UserError, match=r"train\.jsonl\.gz cannot be read \(a truncated file\?\)"):
        read(tmp_path, "text", tmp_path)
    with pytest.raises(UserError, match="does not exist"):
        read(tmp_path, "text", tmp_path / "nowhere")


# --- pairs ---


def test_aan(tmp_path):
    (tmp_path / "tsv_data").mkdir()
    for name in ("train", "eval", "test"):
        (tmp_path / "tsv_data" / f"new_aan_pairs.{name}.tsv").write_text(
            '1.0\ti\tj\tab "\tc\n0\tk\tl\td\te f\n'
        )
    _, found = read(tmp_path, "retrieval", tmp_path)
    assert [[bytes(text) for text in pair] for pair in found["valid"]] == [[b'ab "', b"c"], [b"d", b"e f"]]
    assert found["test"].labels.tolist() == [1, 0]
    for line, message in (
        ("1.0\ti\tj\ta", r"eval\.tsv, line 3: expected 5 columns \(label, id, id, text, text\), got 4"),
        ("2\ti\tj\ta\tb", "line 3: expected a label of 0 or 1, got '2'"),
    ):
        with open(tmp_path / "tsv_data" / "new_aan_pairs.eval.tsv", "w") as file:
            file.write("1.0\ti\tj\ta\tc\n0\tk\tl\td\te f\n" + line)
        with pytest.raises(UserError, match=message):
            read(tmp_path, "retrieval", tmp_path)


def novels(folder):
    """Three books of each kind by two known authors; each book repeats a different letter."""
    books = [("train", "Emma_158", "a"), ("train", "Pride_1342", "b"), ("test", "Dracula_345", "c")]
    lines, texts = ["split\tindex\trepo\toffset_bytes\tlength_bytes\twords"], dict.fromkeys(SPLITS, "")
    for split, repo, letter in books:
        lines.append(f"{split}\t0\tx/{repo}\t{len(texts[split])}\t50000\t1")
        texts[split] += letter * 50_000
    (folder / "books.tsv").write_text("\n".join(lines))
    (folder / "train.txt").write_text(texts["train"])
    for split in ("valid", "test"):
        (folder / f"{split}.txt.gz").write_bytes(gzip.compress(texts[split].encode()))


def test_pairs_of_passages_from_novels(tmp_path):
    novels(tmp_path)
    sizes = {f"{split}_examples": 40 for split in SPLITS}
    source, found = read(tmp_path, "retrieval", tmp_path, length=4000, **sizes)
    assert "novels" in source.name
    author = {ord("a"): "Austen", ord("b"): "Austen", ord("c"): "Stoker"}
    for split in SPLITS:
        data = found[split]
        assert data.labels.mean() == 0.5
        assert set(data.lengths.reshape(-1)) == {4000}
        for (a, b), label in zip(data, data.labels):
            assert len(set(a)) == len(set(b)) == 1
            assert (author[a[0]] == author[b[0]]) == label
            if label and author[a[0]] == "Austen":
                assert a[0] != b[0]
    whole = (tmp_path / "test.txt.gz").read_bytes()
    damage(tmp_path / "test.txt.gz")
    with pytest.raises(UserError, match=r"--data_dir: the books of .* cannot be read: .*invalid block type"):
        read(tmp_path, "retrieval", tmp_path)
    (tmp_path / "test.txt.gz").write_bytes(whole)
    (tmp_path / "books.tsv").write_text((tmp_path / "books.tsv").read_text().replace("_345", "_999"))
    with pytest.raises(UserError, match=r"the author of x/Dracula_999 is not known"):
        read(tmp_path, "retrieval", tmp_path, **sizes)
