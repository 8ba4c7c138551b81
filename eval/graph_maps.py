from eval.studies.graph_maps import main
from train.cli.command import start

if __name__ == "__main__":
    start(main, "eval.graph_maps")
