"""Where context pays: distances, positions and both memories, checked by reading the text directly."""

import json

import numpy as np
import pytest

from brl_jax.layers import BRLConfig, FullConfig
from brl_jax.models import DecoderConfig
from eval.tasks.context import Boundaries, _by_distance, boundaries, last_distances, summarise


@pytest.mark.parametrize("ngram", [1, 2, 3])
def test_distances_match_a_plain_search(ngram):
    stream = np.random.default_rng(ngram).integers(0, 4, 60)
    expected = []
    for place in range(1, len(stream)):
        wanted = stream[place - ngram + 1 : place + 1].tolist()
        before = [
            place - 1 - end
            for end in range(ngram - 1, place)
            if place >= ngram - 1 and stream[end - ngram + 1 : end + 1].tolist() == wanted
        ]
        expected.append(min(before, default=-1) if place >= ngram - 1 else -1)
    found = last_distances(stream, ngram)
    assert found.tolist() == expected
    assert -1 in expected
    assert max(expected) > 3
    assert last_distances(stream[:2], 3).tolist() == [-1]


def decoder(mechanism, layers=2):
    return DecoderConfig(num_layers=layers, d_model=16, num_heads=2, mechanism=mechanism)


def test_boundaries():
    brl = BRLConfig(window=4, num_compressed=2, block_size=8, history_size=16, memory="layer")
    assert boundaries(decoder(brl), 64) == Boundaries(6, 23, 8)
    assert boundaries(decoder(FullConfig()), 64) == Boundaries(64, 64, 64)


def test_losses_are_averaged_by_distance_and_position():
    rng = np.random.default_rng(3)
    stream = rng.integers(0, 6, (2, 25))
    read = {
        "tokens": stream[:, :-1],
        "targets": stream[:, 1:],
        "weights": (np.arange(24) < np.array([[24], [17]])).astype(np.float32),
        "carried": rng.random((2, 24)).astype(np.float32),
        "cleared": rng.random((2, 24)).astype(np.float32),
    }
    result = summarise(read, 12, Boundaries(1, 4, 5), 1)
    wanted = {"within reach": [], "history": [], "beyond": [], "new": []}
    places = {place: [] for place in range(5)}
    for row in range(2):
        for i in range(24 if row == 0 else 17):
            target, before = stream[row, i + 1], stream[row, : i + 1].tolist()
            loss = (float(read["carried"][row, i]), float(read["cleared"][row, i]))
            places[i % 12 % 5].append(loss)
            if target not in before:
                wanted["new"].append(loss)
                continue
            distance = before[::-1].index(target)
            name = "within reach" if distance <= 1 else "history" if distance <= 4 else "beyond"
            wanted[name].append(loss)
    assert all(wanted.values())
    measured = list(result["regions"].values()) + result["by_position"]
    for found, losses in zip(measured, [*wanted.values(), *places.values()], strict=True):
        assert found["targets"] == len(losses)
        np.testing.assert_allclose([found["carried"], found["cleared"]], np.mean(losses, axis=0), rtol=1e-6)
    assert result["targets"] == 41
    assert sum(each["targets"] for each in result["by_distance"]) == 41 - len(wanted["new"])


def test_bins_without_targets():
    """A text in which nothing recurs has no loss by distance."""
    empty = {"by_distance": [{"targets": 0, "first": 0, "end": 2, "carried": None}]}
    assert _by_distance(empty, "carried").shape == (0, 2)
    some = {"by_distance": [*empty["by_distance"], {"targets": 1, "first": 3, "end": 9, "carried": 0.5}]}
    assert _by_distance(some, "carried").tolist() == [[6.0, 0.5]]


@pytest.mark.slow
def test_runs_side_by_side(tmp_path, capsys):
    """A local run carries nothing over. A BRL run does, and its loss with memory is what eval.lm prints."""
    import eval.tasks.lm
    import train.lm

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i % 7} of {i * i % 97} and {i % 11} more, " for i in range(900)))
    sizes = (
        f"--data text:{text} --steps 3 --batch 2 --length 32 --num_layers 1 --d_model 16 --num_heads 2 --d_ff 16 "
        "--sample_tokens 0 --tensorboard False --mechanism.window 4"
    )
    brl = "--mechanism brl --mechanism.block_size 8 --mechanism.num_compressed 4 --mechanism.history_size 8"
    for name, options in (("brl", brl), ("local", "--mechanism local")):
        train.lm.main(f"small {options} --workdir {tmp_path / name} {sizes}".split())
    capsys.readouterr()
    eval.tasks.lm.main(["--workdir", str(tmp_path / "brl")])
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    picture = tmp_path / "context.png"
    both = ["--workdir", str(tmp_path / "brl"), str(tmp_path / "local"), "--tokens", "0"]
    eval.tasks.context.main([*both, "--json", "True", "--picture", str(picture)])
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert picture.read_bytes().startswith(b"\x89PNG")
    np.testing.assert_allclose(first["carried"], loss, rtol=1e-5)
    assert abs(first["carried"] - first["cleared"]) > 1e-7
    assert second["carried"] == second["cleared"]
    assert (first["reach"], first["history"], first["block"]) == (3, 32, 8)
    for result in (first, second):
        assert sum(region["targets"] for region in result["regions"].values()) == result["targets"]
    eval.tasks.context.main([*both, "--ngram", "2"])
    assert "| brl (brl) | cleared |" in capsys.readouterr().out
