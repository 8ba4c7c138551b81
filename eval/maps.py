"""What each mechanism of a family sees, as one picture: python -m eval.maps --family FAMILY --picture FILE."""

from eval.harness.entry import start
from eval.studies.maps import main

if __name__ == "__main__":
    start(main, "eval.maps")
