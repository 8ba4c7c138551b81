"""A run of any task that a signal stops goes on bit for bit."""

import pytest

from tests.train import test_copy, test_lra, test_mlm, test_regression
from tests.train.logs import metrics_lines
from tests.train.resume import stop_and_go_on
from train.data.copying import PairStream
from train.data.drawn import DrawnBatches
from train.data.lra.batches import TrainBatches
from train.data.masking import MaskedBatches

MEASURED = ("step", "loss", "accuracy", "grad_norm", "val_loss", "val_accuracy")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("run", "options", "stream"),
    [
        (test_copy.run, "--data_dir {pairs} --tokenizer bpe:260", PairStream),
        (test_lra.run, test_lra.LOCAL, TrainBatches),
        (test_mlm.run, "", MaskedBatches),
        (test_regression.run, "", DrawnBatches),
    ],
)
def test_a_stopped_run_goes_on_bit_for_bit(run, options, stream, tmp_path, monkeypatch):
    test_copy.write_pairs(tmp_path / "pairs")
    options = options.format(pairs=tmp_path / "pairs")
    run(tmp_path / "whole", options)
    stop_and_go_on(monkeypatch, stream, lambda: run(tmp_path / "stopped", options))
    assert metrics_lines(tmp_path / "stopped", MEASURED) == metrics_lines(tmp_path / "whole", MEASURED)
