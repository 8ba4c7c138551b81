"""Fine-tunes a masked language model on GLUE: python -m train.glue TASK --pretrained DIR [OPTIONS].

TASK is cola, sst2, mrpc, qqp, stsb, mnli, qnli or rte (Wang et al. 2018, arXiv:1804.07461); DIR is the folder of a run
of train.mlm, which gives the network, the tokenizer and the weights. --data_dir names GLUE's folders of tsv files, or
tfds or hf. Every tenth training example is held out to choose the checkpoint; GLUE's dev split is for `python -m
eval.glue --workdir DIR`.
"""

import functools

from train.cli.command import start
from train.cli.main import train_main
from train.tasks.glue import GLUE

main = functools.partial(train_main, [GLUE], name="train.glue")

if __name__ == "__main__":
    start(main, "train.glue")
