"""The tasks, one file each (the settings of lm, lra, copy and graph beside them); `train.tasks.every` lists them.

This file imports none of them, so that a command starts with what its own task needs.
"""
