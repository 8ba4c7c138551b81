"""Trains a classifier on a task of the Long Range Arena: python -m train.lra TASK [OPTIONS], or a preset's name.

`denoise-TASK` and `trace-pathfinder` pretrain an encoder, whose weights `--pretrained RUN` starts from. docs/lra.md has
the data; `python -m eval.lra --workdir DIR` measures the test split.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.lra import LRA
from train.tasks.lra_denoise import LRA_DENOISE
from train.tasks.lra_trace import LRA_TRACE

main = functools.partial(train_main, [LRA, LRA_DENOISE, LRA_TRACE], name="train.lra")

if __name__ == "__main__":
    start(main, "train.lra")
