"""The command line: options, help, and the one command behind `python -m train.NAME`."""
