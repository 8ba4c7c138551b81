"""Bad calls and bad command lines: each gets one clear error that names the argument."""
