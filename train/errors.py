"""The one exception the commands turn into a line on stderr and exit status 2."""


class UserError(ValueError):
    """Input that a user can put right: one line that names the option, what came and what is expected."""
