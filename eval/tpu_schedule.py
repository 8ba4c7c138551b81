"""Instruction schedules of the TPU kernels, without a TPU: python -m eval.tpu_schedule.
"""

from eval.harness.entry import start
from eval.chips.tpu_schedule import main

if __name__ == "__main__":
    start(main, "eval.tpu_schedule")
