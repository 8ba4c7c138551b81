"""Trains a classifier on a task of the Long Range Arena: python -m train.lra TASK [OPTIONS], or a preset's name.

TASK is listops, text, retrieval, image, pathfinder or pathx, each at a size for two CPU cores; `lra-TASK-NAME` are the
papers' settings (train/tasks/lra_config.py). listops, pathfinder and pathx are generated where --data_dir names no
files. `python -m eval.lra --workdir DIR` measures it on the test split. `denoise-TASK` pretrains an encoder on a task's
own sequences, `trace-pathfinder` on labels of its pixels, and `--pretrained RUN` starts from the weights of such a run.
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
