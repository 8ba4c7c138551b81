"""Sources: each byte in exactly one split, splits by name or cut at a line, and one-line errors."""

import bz2
import codecs
import gzip
import json
import lzma
import os
import sysconfig
from pathlib import Path

import datasets
import numpy as np
import pytest
import tensorflow_datasets as tfds

from tests.support.prepared import write_info
from tests.support.texts import write
from train.data.named_sources import source_of_rows
from train.data.sources import naming_file, open_source
from train.data.tokenizers.named import train_tokenizer
from train.engine.errors import UserError


def texts(spec, holdout=0.05):
    source = open_source(spec, holdout)
    return {name: b"".join(split.blocks()) for name, split in source.splits.items()}


def lines(count, start=0):
    return b"".join(b"line %d of the text\n" % i for i in range(start, start + count))


# --- the standard library ---


def test_stdlib_holds_out_files_and_is_the_same_again():
    source, again = open_source("stdlib", 0.05), open_source("stdlib", 0.05)
    assert list(source.splits) == ["train", "valid"]
    train, valid = (b"".join(source.splits[s].blocks()) for s in ("train", "valid"))
    assert source.fingerprint == again.fingerprint
    assert b"".join(again.splits["valid"].blocks()) == valid
    assert source.splits["train"].size == pytest.approx(len(train), rel=1e-3)
    assert len(train) > 4_000_000
    assert 0.01 < len(valid) / len(train) < 0.12
    train.decode()
    this = Path(sysconfig.get_path("stdlib"), "this.py").read_bytes().strip()
    assert (this in train) != (this in valid)
    both = train + valid
    for folder, name in ("test", "support/__init__.py"), ("site-packages", "pytest/__init__.py"):
        path = Path(sysconfig.get_path("stdlib"), folder, name)
        assert not path.exists() or path.read_bytes().strip() not in both


def test_stdlib_moves_no_file_when_more_is_held_out():
    few, many = texts("stdlib", 0.02)["valid"], texts("stdlib", 0.2)["valid"]
    assert len(few) < len(many)
    assert few[:200] in many


# --- files ---


def test_files_are_split_by_their_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, count in (("wiki.train.tokens", 50), ("wiki.valid.tokens", 5), ("wiki.test.tokens", 6)):
        Path(name).write_bytes(lines(count))
        Path(name + ".gz").write_bytes(gzip.compress(lines(count)))
    wanted = {"train": lines(50), "valid": lines(5), "test": lines(6)}
    assert texts("text:wiki.*.tokens") == texts("text:*.gz") == wanted
    assert texts(f"text:{tmp_path}/*train*.gz,wiki.val*.gz,./wiki.test*.gz") == wanted
    assert texts("text:wiki.valid.tokens,wiki.test.tokens").keys() == {"valid", "test"}


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("holdout", [0.05, 0.5, 0.001])
def test_without_names_the_end_of_the_text_is_held_out_at_a_line(tmp_path, suffix, holdout):
    whole = b""
    for i, count in enumerate([70, 90, 3]):
        text = lines(count, 1000 * i)
        write(tmp_path / f"book{i}.txt{suffix}", text)
        whole += text
    splits = texts(f"text:{tmp_path}/*", holdout)
    assert list(splits) == ["train", "valid"]
    assert splits["train"] + splits["valid"] == whole
    assert splits["train"].endswith(b"\n")
    assert abs(len(splits["valid"]) - holdout * len(whole)) <= 25


@pytest.mark.parametrize(
    ("files", "holdout", "valid"),
    [
        (["é" * 100], 0.125, "é" * 12),  # one line is cut between characters
        (["x\n" * 45, "y" * 10], 0.1, "y" * 10),
        (["x\n" * 44 + "xx", "y" * 10], 0.1, "y" * 10),
        (["x\n" * 45, "y" * 20], 0.1, "y" * 20),  # the share begins inside this file; its line stays whole
        (["x" * 99 + "\n", "y" * 15_000], 0.1, "y" * 1510),  # a long last line is not held out whole
    ],
)
def test_where_the_held_out_text_begins(tmp_path, files, holdout, valid):
    for number, content in enumerate(files):
        (tmp_path / f"{number}.txt").write_text(content)
    splits = texts(f"text:{tmp_path}/*.txt", holdout)
    train = "".join(files).removesuffix(valid)
    assert splits == {"train": f"{train.rstrip()}\n".encode(), "valid": f"{valid}\n".encode()}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_byte_order_mark_is_left_out_of_the_text(tmp_path, suffix):
    for name in "ab":
        write(tmp_path / f"{name}.txt{suffix}", "\ufeffone\n\ufefftwo\n".encode())
    found = texts(f"text:{tmp_path}/*", 0.4)
    assert (found["train"] + found["valid"]).decode() == "one\n\ufefftwo\n" * 2


def test_files_are_joined_at_lines_and_only_once(tmp_path):
    (tmp_path / "train.0.txt").write_bytes(codecs.BOM_UTF8 + b"no mark\n")
    (tmp_path / "train.1.txt").write_bytes(b"no end")
    (tmp_path / "train.2.txt").write_bytes(b"an end\n")
    (tmp_path / "train.3.txt").write_bytes(b"")
    (tmp_path / "valid.txt").write_bytes(b"v")
    splits = texts(f"text:{tmp_path}/*,{tmp_path}/train.2.txt")
    assert splits == {"train": b"no mark\nno end\nan end\n", "valid": b"v\n"}


def test_a_link_has_its_own_name_and_its_targets_text(tmp_path):
    """Caches may store files under a hash: the link's name gives the split and the compression."""
    (tmp_path / "blobs").mkdir()
    for name, text in (("train", lines(50)), ("valid", lines(5))):
        (tmp_path / "blobs" / f"1f{name[0]}").write_bytes(gzip.compress(text))
        (tmp_path / f"{name}.txt.gz").symlink_to(tmp_path / "blobs" / f"1f{name[0]}")
    (tmp_path / "a_train.txt.gz").symlink_to(tmp_path / "train.txt.gz")  # the same file again
    assert texts(f"text:{tmp_path}/*.gz") == {"train": lines(50), "valid": lines(5)}


def test_the_fingerprint_follows_the_files(tmp_path):
    (tmp_path / "a.txt").write_bytes(lines(30))
    first = open_source(f"text:{tmp_path}/*", 0.05).fingerprint
    assert open_source(f"text:{tmp_path}/*", 0.05).fingerprint == first
    assert open_source(f"text:{tmp_path}/*", 0.06).fingerprint != first
    (tmp_path / "a.txt").write_bytes(lines(31))
    assert open_source(f"text:{tmp_path}/*", 0.05).fingerprint != first


def test_bad_files_are_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r"^--data: no file matches 'x/\*\.txt' \(relative to .*\)$"):
        texts("text:x/*.txt")
    Path("empty.txt").touch()
    with pytest.raises(UserError, match="matches empty files only"):
        texts("text:*.txt")
    Path("tiny.txt").write_bytes(b"x")
    with pytest.raises(UserError, match=r"tiny\.txt has 1 bytes, too few"):
        texts("text:*.txt")
    whole = gzip.compress(os.urandom(1000))
    for name, content in (
        ("cut.gz", whole[:500]),
        ("not.gz", b"plain text"),
        ("broken.gz", whole[:200] + whole[300:]),
    ):
        Path(name).write_bytes(content)
        with pytest.raises(UserError, match=f"^--data: cannot read .*{name}: "):
            texts(f"text:{name}")
        os.rename(name, f"train.{name}")
        Path("valid.txt").write_bytes(b"v")
        with pytest.raises(UserError, match=f"^--data: cannot read .*{name}: "):
            texts(f"text:train.{name},valid.txt")


def test_a_file_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "good.txt").write_bytes("é\n".encode() * 9)
    (tmp_path / "a.txt").write_bytes("é\n".encode("latin-1"))
    source = open_source(f"text:{tmp_path}/*.txt", 0.1)
    with (
        pytest.raises(UserError, match=r"^--data: .*/a\.txt is not UTF-8 \(b'\\xe9.*--tokenizer bytes$"),
        naming_file(source),
    ):
        train_tokenizer("chars", lambda: source.splits["train"].blocks())


@pytest.mark.parametrize("name", ["book", "book.txt", "book.GZ", "book.bz2"])
@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress], ids=["gzip", "bz2", "xz"])
def test_compressed_files_are_known_by_their_first_bytes(compress, name, tmp_path):
    (tmp_path / name).write_bytes(compress(lines(50)))
    found = texts(f"text:{tmp_path}/{name}", 0.1)
    assert found["train"] + found["valid"] == lines(50)


@pytest.mark.parametrize(
    ("name", "start", "message"),
    [
        ("book.zst", b"\x28\xb5\x2f\xfd", "it is compressed by zstd; expected text, or text compressed by gzip, "),
        ("book.txt", b"PK\x03\x04", "it is compressed by zip; expected text"),
        ("book.xz", b"plain text", "it is named as compressed and is not"),
    ],
)  # fmt: skip
def test_files_of_other_compressions_are_refused(name, start, message, tmp_path):
    (tmp_path / name).write_bytes(start + lines(50))
    with pytest.raises(UserError, match=f"^--data: cannot read .*{name}: {message}"):
        texts(f"text:{tmp_path}/{name}")


# --- Hugging Face datasets ---


@pytest.fixture
def offline(monkeypatch, tmp_path_factory):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("hf"))
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def test_hf_saved_folder(tmp_path, offline):
    rows = [" = Title = \n", "", " some words é \n"]
    table = {"text": rows, "n": [1, 2, 3]}
    datasets.DatasetDict(
        {
            "train": datasets.Dataset.from_dict(table),
            "validation": datasets.Dataset.from_dict({"text": ["v"], "n": [4]}),
        }
    ).save_to_disk(tmp_path / "wikitext")
    splits = texts(f"hf:{tmp_path}/wikitext")
    assert splits == {"train": " = Title = \n\n some words é \n".encode(), "valid": b"v\n"}


def test_hf_without_validation_holds_out_the_last_rows(tmp_path, offline):
    rows = [f"document {i}" for i in range(1000)]
    datasets.Dataset.from_dict({"content": rows}).save_to_disk(tmp_path / "owt")
    splits = texts(f"hf:{tmp_path}/owt", 0.01)
    assert splits["train"].decode().splitlines() == rows[:990]
    assert splits["valid"].decode().splitlines() == rows[990:]


@pytest.mark.parametrize(
    ("rows", "holdout", "kept"), [(3, 0.01, 2), (3, 0.99, 1), (10, 0.26, 7), (2, 0.5, 1)]
)
def test_rows_that_are_held_out(rows, holdout, kept):
    """Rounded to the nearest number, but at least one row is held out and at least one is left."""
    blocks = lambda *bounds: iter([repr(bounds).encode()])  # noqa: E731
    splits = source_of_rows("", "--data x", {"train": rows}, blocks, holdout).splits
    found = {name: b"".join(split.blocks()).decode() for name, split in splits.items()}
    assert found == {"train": f"('train', 0, {kept})", "valid": f"('train', {kept}, {rows})"}


def rows_of(tmp_path, rows):
    """A folder of JSON lines, readable as a stream and as a table."""
    for name in ("train", "validation"):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


@pytest.mark.parametrize("kind", ["hf", "hf-stream"])
@pytest.mark.parametrize("first", [{"id": "row-0", "text": None}, {"id": "row-0"}], ids=["null", "absent"])
def test_a_first_row_without_text(kind, first, tmp_path, offline):
    """Reads the column named text, not the ids, which are the only strings in the first row."""
    folder = rows_of(tmp_path, [first, *({"id": f"row-{i}", "text": f"text {i}"} for i in range(1, 5))])
    assert texts(f"{kind}:{folder}")["train"] == b"\ntext 1\ntext 2\ntext 3\ntext 4\n"


@pytest.mark.parametrize("kind", ["hf", "hf-stream"])
@pytest.mark.parametrize("value", [["a", "b"], 3, {"a": "b"}], ids=["list", "number", "struct"])
def test_a_text_that_is_none(kind, value, tmp_path, offline):
    folder = rows_of(tmp_path, [{"id": "row-0", "text": value}, {"id": "row-1", "text": value}])
    with pytest.raises(
        UserError, match=f"^--data {kind}:.*: the field 'text' holds something other than strings"
    ):
        texts(f"{kind}:{folder}")


def test_hf_folder_of_files(tmp_path, offline):
    (tmp_path / "train.txt").write_bytes(lines(20))
    (tmp_path / "test.txt").write_bytes(lines(4))
    splits = texts(f"hf:{tmp_path}", 0.1)
    assert splits == {"train": lines(18), "valid": lines(2, 18), "test": lines(4)}


def test_hf_errors_are_one_line(tmp_path, offline):
    with pytest.raises(UserError, match=r"^--data hf:wikitext:wikitext-103-raw-v1: [^\n]+$"):
        open_source("hf:wikitext:wikitext-103-raw-v1", 0.05)
    datasets.Dataset.from_dict({"question": ["a"], "answer": ["b"]}).save_to_disk(tmp_path / "qa")
    with pytest.raises(UserError, match="cannot tell which field is the text among question, answer"):
        open_source(f"hf:{tmp_path}/qa", 0.05)
    datasets.Dataset.from_dict({"text": ["a"]}).save_to_disk(tmp_path / "one")
    with pytest.raises(UserError, match="'train' has 1 rows, too few"):
        open_source(f"hf:{tmp_path}/one", 0.05)
    datasets.DatasetDict({"extra": datasets.Dataset.from_dict({"text": ["a"]})}).save_to_disk(
        tmp_path / "extra"
    )
    with pytest.raises(UserError, match="expected a split named train, got extra"):
        open_source(f"hf:{tmp_path}/extra", 0.05)


# --- TensorFlow Datasets ---


@pytest.fixture(scope="module")
def tiny_books(tmp_path_factory):
    features = tfds.features.FeaturesDict(
        {"book_id": np.int32, "book_title": tfds.features.Text(), "book_text": tfds.features.Text()}
    )

    class TinyBooks(tfds.core.GeneratorBasedBuilder, skip_registration=True):
        name = "tiny_books"
        VERSION = tfds.core.Version("1.0.0")

        def _info(self):
            return tfds.core.DatasetInfo(builder=self, features=features)

        def _split_generators(self, download):
            raise AssertionError("it is prepared")

        def _generate_examples(self):
            raise AssertionError("it is prepared")

    data_dir = tmp_path_factory.mktemp("tfds")
    books = [{"book_id": i, "book_title": f"Book {i}", "book_text": f"Text {i} é\nend"} for i in range(600)]
    builder = TinyBooks(data_dir=data_dir, file_format="array_record")
    write_info(builder, features, data_dir / "tiny_books" / "1.0.0", {"train": books, "test": books[:2]})
    tfds.core.add_data_dir(data_dir)


def test_tfds_reads_prepared_records(tiny_books):
    splits = texts("tfds:tiny_books", 0.01)
    wanted = [f"Text {i} é\nend\n" for i in range(600)]
    assert {name: text.decode() for name, text in splits.items()} == {
        "train": "".join(wanted[:594]),
        "valid": "".join(wanted[594:]),
        "test": "".join(wanted[:2]),
    }
    assert texts("tfds:tiny_books:book_title")["test"] == b"Book 0\nBook 1\n"
    assert texts("tfds:tiny_books:1.0.0")["test"] == splits["test"]
    with pytest.raises(UserError, match="no text field 'body', the data set has book_text, book_title"):
        open_source("tfds:tiny_books:body", 0.05)


@pytest.mark.parametrize(
    ("name", "splits"), [("lm1b", ["train", "test"]), ("wiki40b/en", ["train", "validation", "test"])]
)
def test_tfds_knows_the_public_data_sets(name, splits, tmp_path):
    with pytest.raises(UserError, match="Failed to construct"):
        open_source(f"tfds:{name.partition('/')[0]}/no_such_config", 0.05)
    builder = tfds.builder(name, data_dir=tmp_path, file_format="array_record")
    write_info(builder, None, Path(builder.data_dir), {split: range(30) for split in splits})
    with tfds.testing.mock_data(num_examples=30, data_dir=str(tmp_path)):
        found = texts(f"tfds:{name}", 0.1)
    assert list(found) == ["train", "valid", "test"]
    assert found["test"].count(b"\n") == 30
    assert found["train"].count(b"\n") == (30 if "validation" in splits else 27)


def test_tfds_errors_are_one_line():
    with pytest.raises(UserError, match=r"^--data tfds:no_such_thing: Dataset no_such_thing not found\.$"):
        open_source("tfds:no_such_thing", 0.05)
    with pytest.raises(UserError, match=r"^--data tfds:lm1b/no_such_config: Failed to construct [^\n]+$"):
        open_source("tfds:lm1b/no_such_config", 0.05)
