"""Errors that tell the reader what is wrong, with which value, and what to do.

The command line prints the message of an :class:`ElsiError` on one line; no traceback is needed to act on it.
"""


class ElsiError(ValueError):
    """Bad input: an argument, a file or a model that cannot be used as asked. Exit code 2 on the command line."""


class AssetError(ElsiError):
    """A target or data file could not be fetched, verified or stored. Exit code 1 on the command line."""
