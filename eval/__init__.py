import train  # noqa: F401  # Ctrl-C during the imports of a command
