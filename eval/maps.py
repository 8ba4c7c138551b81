"""What each mechanism of a family sees, as one picture: python -m eval.maps --family FAMILY --picture FILE."""

from eval.studies.maps import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.maps")
