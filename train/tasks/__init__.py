"""The tasks, one file each (lm, lra, copy and graph have a second file for their settings); `train.tasks.every` lists
them.

This file imports none of them, so that a command starts with what its own task needs.
"""
