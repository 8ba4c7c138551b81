"""Every mechanism on small tasks of the Long Range Arena: python -m eval.survey --folder DIR [OPTIONS]."""

from eval.studies.survey.main import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.survey")
