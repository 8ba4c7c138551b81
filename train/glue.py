"""Fine-tunes a masked language model on GLUE: python -m train.glue TASK --pretrained DIR [OPTIONS].

DIR is the folder of a run of train.mlm. docs/glue.md has the data; `python -m eval.glue --workdir DIR` measures it.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.glue import GLUE

main = functools.partial(train_main, [GLUE], name="train.glue")

if __name__ == "__main__":
    start(main, "train.glue")
