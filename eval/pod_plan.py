"""What a training step takes on a TPU pod, planned without one: python -m eval.pod_plan PRESET --topology v5e:16x16."""

from eval.chips.pod_plan import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.pod_plan")
