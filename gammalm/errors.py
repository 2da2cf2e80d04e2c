"""The kinds of fault gammalm reports: one exception type each, whose message says what, where and what to do.

The command line prints the message without a traceback and exits with `exit_status`.
"""


class GammalmError(Exception):
    """Any fault that a user can understand and act on."""

    exit_status = 1


class ConfigError(GammalmError):
    """A config, grid or command line that cannot be run. Raised before any device work."""

    exit_status = 2


class DataError(GammalmError):
    """A corpus, tokenizer or token shard that is missing, damaged or does not fit."""


class CheckpointError(GammalmError):
    """A checkpoint that cannot be written or read back whole."""


class TrainingError(GammalmError):
    """A run that cannot go on: non-finite numbers, a device that ran out of memory."""
