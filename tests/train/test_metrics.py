"""What a user without a terminal sees of long work."""

from train import metrics


def test_making_of_many_pieces_says_how_far_it_is(monkeypatch, capsys):
    clock = iter(range(0, 1000, 6))
    monkeypatch.setattr(metrics.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(metrics.Progress, "update", lambda *_, **__: None)  # a bar asks for the time too
    assert list(metrics.tracked("abcde", [250, 250, 250, 250, 40], "images, train")) == list("abcde")
    # After 12 and 24 seconds of 6 a piece.
    assert capsys.readouterr().err.splitlines() == [
        "images, train: 500 of 1,040  0:00:13 left",
        "images, train: 1,000 of 1,040  0:00:01 left",
    ]
