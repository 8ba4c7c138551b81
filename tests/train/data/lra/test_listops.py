"""ListOps: labels against a second evaluator, the distribution of the specification, and the release's file format."""

import functools
import gzip
import json
import re
import time

import numpy as np
import pytest

import train.lra_data as generate
from train.data.lra import listops
from train.data.lra.listops import ListOpsSpec, generate_trees
from train.data.lra.tasks import LraDataConfig, load
from train.data.lra.workers import in_processes
from train.engine.errors import UserError

SMALL = ListOpsSpec(min_tokens=10, max_tokens=80, max_depth=5, max_args=4)


def evaluate(words):
    """The value, depth and largest number of arguments of an expression, evaluated with a stack."""
    stack, depth, most = [[]], 0, 0
    for word in words:
        if word.startswith("["):
            stack.append([word[1:]])
        elif word == "]":
            name, *values = stack.pop()
            most = max(most, len(values))
            middle = sorted(values)[(len(values) - 1) // 2 : len(values) // 2 + 1]
            value = {
                "MIN": min(values),
                "MAX": max(values),
                "MED": sum(middle) // len(middle),
                "SM": sum(values) % 10,
            }[name]
            stack[-1].append(value)
        else:
            stack[-1].append(int(word))
            depth = max(depth, len(stack))
    assert len(stack) == 1
    assert len(stack[0]) == 1
    return stack[0][0], depth, most


def words_of(trees):
    names = [*map(str, range(10)), *listops.OPERATORS, "]"]
    stops = np.cumsum(trees.lengths)
    return [[names[t] for t in trees.tokens[stop - n : stop]] for stop, n in zip(stops, trees.lengths)]


@pytest.fixture(scope="module")
def published():
    """Trees drawn from the published specification."""
    return generate_trees(np.random.default_rng(3), 600, ListOpsSpec())


def test_every_label_is_the_value(published):
    for trees in (published, generate_trees(np.random.default_rng(4), 2000, SMALL)):
        assert [evaluate(words)[0] for words in words_of(trees)] == trees.labels.tolist()


def test_lengths_depths_and_arguments_are_the_specifications(published):
    assert published.lengths.min() > 500
    assert published.lengths.max() < 2000
    # Long trees are rarer than short ones, as in the release.
    assert 950 < published.lengths.mean() < 1150
    measured = [evaluate(words)[1:] for words in words_of(published)]
    assert max(depth for depth, _ in measured) == 10
    assert max(most for _, most in measured) == 10
    counts = np.bincount(published.tokens, minlength=15)
    # Operators and digits are equally likely, and every operator is closed.
    assert counts[14] == counts[10:14].sum()
    np.testing.assert_allclose(counts[10:14] / counts[14], 0.25, atol=0.02)
    np.testing.assert_allclose(counts[:10] / counts[:10].sum(), 0.1, atol=0.01)
    # MIN and MAX make 0 and 9 the most frequent values.
    shares = np.bincount(published.labels, minlength=10) / 600
    assert set(np.argsort(shares)[-2:]) == {0, 9}
    assert shares.min() > 0.03
    assert shares.max() < 0.28


def test_small_trees_are_as_a_walk_draws_them():
    """The lengths match the specification's own recursion, drawn node by node."""
    rng = np.random.default_rng(5)

    def size(depth):
        if depth == SMALL.max_depth or rng.random() > 0.25:
            return 1
        return 2 + sum(size(depth + 1) for _ in range(rng.integers(2, SMALL.max_args + 1)))

    drawn = np.array([n for n in (size(1) for _ in range(60_000)) if 10 < n < 80])
    ours = generate_trees(np.random.default_rng(6), 4000, SMALL).lengths
    for quantile in (0.1, 0.25, 0.5, 0.75, 0.9):
        assert abs(np.quantile(ours, quantile) - np.quantile(drawn, quantile)) <= 2.0
    assert ours.mean() == pytest.approx(drawn.mean(), rel=0.05)


def test_files_are_as_the_releases_and_read_back(tmp_path):
    sizes = {"train": 30, "valid": 5, "test": 7}
    listops.write_release(tmp_path / "out", SMALL, 1, sizes, 1)
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        f"basic_{x}.tsv" for x in ("train", "val", "test")
    }
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    header, *lines = (tmp_path / "out" / "basic_train.tsv").read_text().splitlines()
    assert header == "Source\tTarget"
    for line in lines:
        source, target = line.split("\t")
        assert evaluate(source.replace("( ", "").replace(") ", "").removesuffix(" )").split())[0] == int(
            target
        )
        # One bracket per argument and one for the end, each closed afterwards: ( ( ( [MAX 2 ) 3 ) ] ).
        assert (
            source.count("(")
            == source.count(")")
            == len(re.findall(r"\d|\]", source)) - 1 + source.count("[")
        )

    def read_to(run, **options):
        return load(LraDataConfig(task="listops", length=80, **options), tmp_path / run, tuple(sizes))[1]

    read = read_to("a", data_dir=str(tmp_path / "out"))
    counts = {f"{split}_examples": n for split, n in sizes.items()}
    made = read_to("b", listops=SMALL, data_seed=1, **counts)
    for split, count in sizes.items():
        assert len(read[split]) == count
        assert read[split].digest == made[split].digest
    plain = tmp_path / "out" / "basic_val.tsv"
    plain.with_name("basic_val.tsv.gz").write_bytes(gzip.compress(plain.read_bytes()))
    plain.unlink()
    assert read_to("c", data_dir=str(tmp_path / "out"))["valid"].digest == made["valid"].digest


def test_the_command_says_how_fast_it_was(tmp_path, capsys):
    line = f"--out {tmp_path}/out --train_examples 20 --valid_examples 2 --test_examples 3 --processes 1"
    generate.main(["listops", *line.split(), "--listops.min_tokens", "10", "--listops.max_tokens", "80"])
    said = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (said["task"], said["examples"]) == ("listops", 25)
    assert said["examples_per_minute"] > 0
    assert len((tmp_path / "out" / "basic_train.tsv").read_text().splitlines()) == 21
    for argv, message in (
        (["listops", *line.split()], "--out: .*out is there already; expected the name of a new folder"),
        (["listops"], "--out: expected the name of a new folder, got none"),
        (["image", "--out", "x"], "image"),
        (
            ["pathfinder", "--out", str(tmp_path / "x"), "--resolution", "40"],
            "invalid choice '40' for argument '--resolution'",
        ),
    ):
        with pytest.raises(UserError, match=message):
            generate.main(argv)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_the_release_keeps_its_brackets():
    trees = generate_trees(np.random.default_rng(0), 50, ListOpsSpec(4, 7, 2, 4))
    texts = [text.decode() for text in listops._texts(trees)]
    assert all(re.fullmatch(r"(\( )+\[\w+ (\d \) )+\] \)", text) for text in texts)


@pytest.mark.slow
def test_any_number_of_processes_gives_the_same(monkeypatch):
    monkeypatch.setattr(listops, "_CHUNK", 20)
    one, two = (
        list(listops.generated(SMALL, 9, {"train": 50, "valid": 1, "test": 1}, n)["train"]()) for n in (1, 2)
    )
    assert [len(trees.labels) for trees in one] == [20, 20, 10]
    for ours, theirs in zip(one, two, strict=True):
        for a, b in zip(ours, theirs):
            np.testing.assert_array_equal(a, b)


def _mark(folder, split, number, size):
    time.sleep(0.05)
    (folder / f"{split}-{number}").touch()


@pytest.mark.slow
def test_an_interrupt_does_not_wait_for_chunks(tmp_path):
    sizes = {"train": 1000, "valid": 1, "test": 1}
    chunks = in_processes(functools.partial(_mark, tmp_path), sizes, 1, 2, "marks")["train"]()
    next(chunks)
    with pytest.raises(KeyboardInterrupt):
        chunks.throw(KeyboardInterrupt)
    assert len(list(tmp_path.iterdir())) < 1000


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("( ( [MAX 1 ) ] )", r"line 3: expected 2 columns \(Source, Target\), got 1$"),
        ("( ( [MAX 1 ) ] )\t1\t2", "line 3: expected 2 columns .*, got 3$"),
        ("( ( [MAX 1 ) ] )\t10", "line 3: expected a value of 0 to 9, got '10'$"),
        ("( ( [MAX 1 ) ] )\tx", "line 3: expected a value of 0 to 9, got 'x'$"),
        (
            "( ( [FIRST 1 ) ] )\t1",
            r"line 3: expected an expression of MIN, MAX, MED and SM, got '\( \( \[FIRST",
        ),
        ("\t1", "line 3: expected an expression"),
        ("( ( [MAX 1 )\t1", r"line 3: the expression's brackets are not balanced; a truncated file\?$"),
    ],
)
def test_bad_lines_are_named(tmp_path, line, message):
    good = "Source\tTarget\n( ( ( [MIN 1 ) 2 ) ] )\t1\n"
    for name in ("train", "val", "test"):
        (tmp_path / f"basic_{name}.tsv").write_text(good + (f"{line}\n" if name == "train" else ""))
    config = LraDataConfig(task="listops", data_dir=str(tmp_path))
    with pytest.raises(UserError, match=rf"^--data_dir: .*basic_train\.tsv, {message}"):
        load(config, tmp_path / "run", ("train",))
    assert not list((tmp_path / "run").rglob("*.*"))
    assert len(load(config, tmp_path / "run", ("valid",))[1]["valid"]) == 1


def test_bad_folders_and_specifications(tmp_path):
    (tmp_path / "basic_train.tsv").write_text("a\tb\n")
    with pytest.raises(UserError, match=r"expected .*basic_val\.tsv or basic_val\.tsv\.gz; there is neither"):
        load(LraDataConfig(task="listops", data_dir=str(tmp_path)), tmp_path / "run", ("train",))
    with pytest.raises(UserError, match="is there already; expected the name of a new folder"):
        listops.write_release(tmp_path, SMALL, 0, {"train": 1, "valid": 1, "test": 1}, 1)
    with pytest.raises(UserError, match="no expression of 1501 to 1999 tokens"):
        listops.write_release(
            tmp_path / "x", ListOpsSpec(1500, 2000, 3, 3), 0, dict.fromkeys(listops._SPLIT_FILES, 1), 1
        )
    assert [p.name for p in tmp_path.iterdir()] == ["basic_train.tsv"]
