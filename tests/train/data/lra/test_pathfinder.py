"""Pathfinder: labels checked by tracing the path, balanced classes, no shortcut by distance, and the release's
folders."""

import itertools

import numpy as np
import pytest
from PIL import Image
from scipy import ndimage

from train.data.lra import pathfinder
from train.data.lra.pathfinder import PathfinderSpec, draw_scene, generate_images, render
from train.data.lra.tasks import LraDataConfig, load
from train.engine.errors import UserError


def is_connected(image, gap):
    """Whether one path joins the two dots of an image: walks between lit pieces over up to `gap` dark pixels."""
    dots, count = ndimage.label(image > 200)
    sizes = ndimage.sum_labels(np.ones_like(image), dots, range(1, count + 1))
    places = ndimage.center_of_mass(dots > 0, dots, np.argsort(sizes)[-2:] + 1)
    pieces, _ = ndimage.label(image > 20, np.ones((3, 3)))
    start, goal = (pieces[round(y), round(x)] for y, x in places)
    todo, seen = [start], {start}
    while todo:
        near = ndimage.distance_transform_edt(pieces != todo.pop()) <= gap
        new = set(np.unique(pieces[near & (pieces > 0)])) - seen
        seen |= new
        todo += new
    return goal in seen


@pytest.mark.parametrize(("resolution", "count", "gap"), [(32, 30, 1.0), (64, 10, 3.0), (128, 10, 4.0)])
def test_every_label_is_what_following_the_path_gives(resolution, count, gap):
    images, labels, _ = generate_images(np.random.default_rng(0), count, PathfinderSpec(resolution))
    assert images.shape == (count, resolution, resolution)
    assert images.dtype == np.uint8
    assert labels.sum() == count // 2
    assert [is_connected(image, gap) for image in images] == labels.astype(bool).tolist()


def test_a_scene_has_two_long_paths_and_short_ones():
    size = pathfinder.SIZES[64]
    scene = draw_scene(np.random.default_rng(1), 64, connected=False)
    assert [len(path) - 1 for path in scene.paths] == [14, 14] + [4] * size.short_paths
    ends = np.concatenate([path[[0, -1]] for path in scene.paths[:2]])
    nearest = np.linalg.norm(scene.dots[:, None] - ends, axis=-1).argmin(axis=1)
    assert sorted(nearest // 2) == [0, 1]
    both = render(scene, 64)
    assert (both == 255).sum() > 2 * 9
    assert both.max() == 255
    # Paths keep their distance from each other.
    paths = [np.concatenate([np.linspace(a, b, 5) for a, b in itertools.pairwise(p)]) for p in scene.paths]
    for i, first in enumerate(paths):
        for second in paths[:i]:
            assert np.linalg.norm(first[:, None] - second, axis=-1).min() > size.clearance - 1.5


@pytest.mark.parametrize(("dashes", "level"), [(6, "curv_baseline"), (9, "curv_contour_length_9")])
def test_the_easier_levels(tmp_path, monkeypatch, dashes, level):
    """Images with shorter paths have correct labels too, and go into the release's folder for that level."""
    monkeypatch.setattr(pathfinder, "_CHUNK", 6)
    scene = draw_scene(np.random.default_rng(1), 32, connected=True, dashes=dashes)
    assert [len(path) - 1 for path in scene.paths] == [dashes] * 2 + [dashes // 3] * 5
    images, labels, _ = generate_images(np.random.default_rng(0), 20, PathfinderSpec(32, dashes))
    assert [is_connected(image, 1.0) for image in images] == labels.astype(bool).tolist()
    folder = tmp_path / "pathfinder32"
    pathfinder.write_release(folder, PathfinderSpec(32, dashes), 0, {"train": 8, "valid": 1, "test": 1}, 1)
    assert (folder / level / "metadata" / "0.npy").read_text().endswith(f"{dashes} {dashes // 3} 5\n")
    assert len(_load(tmp_path, dashes=dashes)) == 8
    with pytest.raises(UserError, match="has no pathfinder files"):
        _load(tmp_path)
    with pytest.raises(ValueError, match="dashes must be one of 6, 9, 14, got 7"):
        LraDataConfig(task="pathfinder", length=1024, dashes=7)


def test_marks_say_which_paths_have_a_dot():
    """One path's pixels if the dots are connected, two paths' if they are not; both dots lie on them."""
    images, labels, marks = generate_images(np.random.default_rng(3), 20, PathfinderSpec(32, 9, marked=True))
    np.testing.assert_array_equal(
        images, generate_images(np.random.default_rng(3), 20, PathfinderSpec(32, 9)).images
    )
    assert marks.dtype == np.uint8
    np.testing.assert_array_equal(marks > 0, images > 20)
    assert (marks[images > 200] == 2).all()
    pieces = [ndimage.label(mark == 2, np.ones((3, 3)))[1] for mark in marks]
    assert pieces == (2 - labels).tolist()
    assert (marks == 1).any((1, 2)).all()


def test_marks_are_the_second_sequences_of_generated_images(tmp_path):
    sizes = {"train_examples": 3, "valid_examples": 1, "test_examples": 1}
    image, marks = _load(tmp_path, dashes=6, marks=True, data_dir=None, **sizes)[1]
    np.testing.assert_array_equal(marks > 0, image > 20)
    message = "--data_dir: expected none, because only generated images have marks"
    with pytest.raises(UserError, match=message):
        _load(tmp_path, dashes=6, marks=True, **sizes)


def test_distance_of_the_dots_tells_little():
    rng = np.random.default_rng(2)
    scenes = [draw_scene(rng, 128, connected=bool(i % 2)) for i in range(30)]
    far = np.array([np.linalg.norm(s.dots[0] - s.dots[1]) for s in scenes])
    connected = np.array([s.connected for s in scenes])
    best = max(np.mean((far > limit) == connected) for limit in far)
    assert max(best, 1 - best) < 0.8


def test_folders_are_as_the_releases_and_read_back(tmp_path, monkeypatch):
    monkeypatch.setattr(pathfinder, "_CHUNK", 6)
    counts = {"train": 12, "valid": 6, "test": 2}
    pathfinder.write_release(tmp_path / "pathfinder32", PathfinderSpec(32), 5, counts, 1)
    level = tmp_path / "pathfinder32" / "curv_contour_length_14"
    assert sorted(p.name for p in (level / "metadata").iterdir()) == ["0.npy", "1.npy", "2.npy", "3.npy"]
    place, name, number, label, *rest = (level / "metadata" / "1.npy").read_text().splitlines()[3].split()
    assert (place, name, number, rest) == ("imgs/1", "sample_3.png", "3", ["14", "4", "5"])
    images, labels, _ = next(pathfinder.generated(PathfinderSpec(32), 5, counts, 1)["train"]())
    np.testing.assert_array_equal(np.asarray(Image.open(level / "imgs/0/sample_2.png")), images[2])
    assert label == str(list(pathfinder.generated(PathfinderSpec(32), 5, counts, 1)["train"]())[1].labels[3])
    for folder in (tmp_path, tmp_path / "pathfinder32", level):
        config = LraDataConfig(task="pathfinder", length=1024, data_dir=str(folder))
        _, read = load(config, tmp_path / "run", ("train", "valid", "test"))
        assert [len(read[split]) for split in ("train", "valid", "test")] == [16, 2, 2]
        assert bytes(read["train"][2][0]) == images[2].tobytes()
        assert read["train"].labels[:6].tolist() == labels.tolist()


@pytest.fixture
def release(tmp_path):
    """A complete folder of ten black images."""
    (tmp_path / "metadata").mkdir()
    (tmp_path / "imgs").mkdir()
    Image.new("L", (32, 32)).save(tmp_path / "imgs" / "a.png")
    (tmp_path / "metadata" / "0.npy").write_text("imgs a.png 0 1\n" * 10)
    return tmp_path


def _load(folder, **changes):
    config = LraDataConfig(**({"task": "pathfinder", "length": 1024, "data_dir": str(folder)} | changes))
    return load(config, folder / "run", ("train",))[1]["train"]


def test_empty_images_are_left_out(release):
    (release / "imgs" / "b.png").write_bytes(b"")
    with open(release / "metadata" / "0.npy", "a") as file:
        file.write("imgs b.png 10 0\nimgs a.png 11 0\n")
    assert _load(release).labels.tolist() == [1] * 8 + [0]


def test_bad_folders_are_named(release, tmp_path):
    with pytest.raises(UserError, match=r"expected 64 x 64 pixels, got 32 x 32 in .*a\.png"):
        _load(release, resolution=64, length=4096)
    image = (release / "imgs" / "a.png").read_bytes()
    (release / "imgs" / "a.png").write_bytes(image[:40])
    with pytest.raises(UserError, match=r"cannot read .*a\.png \(truncated\?\): "):
        _load(release)
    (release / "imgs" / "a.png").unlink()
    with pytest.raises(UserError, match=r"cannot read .*a\.png .*: No such file"):
        _load(release)
    (release / "imgs" / "a.png").write_bytes(image)
    for line, message in (
        (
            "imgs a.png 3",
            r"0\.npy, line 3: expected at least 4 columns \(folder, file, number, label\), got 3",
        ),
        ("imgs a.png 3 2", r"0\.npy, line 3: expected a label of 0 or 1 in column 4, got '2'"),
    ):
        (release / "metadata" / "0.npy").write_text("imgs a.png 0 1\n" * 2 + line + "\n")
        with pytest.raises(UserError, match=message):
            _load(release)
    with pytest.raises(UserError, match="has no pathfinder files"):
        _load(release / "imgs")
