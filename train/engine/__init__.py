"""The training engine: the loop, its step and its state, checkpoints, metrics, the mesh and the processes.

It knows no mechanism, no task and no command line.
"""
