"""Command-line options that several subcommands share: `--config SPEC` with `--config.NAME=VALUE` for single values."""

import argparse

from ml_collections import ConfigDict

from gammalm.config import is_net, load_config, validate
from gammalm.errors import ConfigError

PREFIX = "--config."


def add_config(parser, required: bool = True) -> None:
    """Give `parser`, or a group of it, `--config SPEC`, and let it take `--config.NAME=VALUE` (`args.overrides`)."""
    parser.add_argument(
        "--config",
        required=required,
        metavar="SPEC",
        help="a config by name or path, with its arguments: lm:size=tiny,gamma=1.0 or path/to/mine.py. "
        "Single values are changed with --config.NAME=VALUE, for instance --config.optimizer.learning_rate=1e-3",
    )
    parser.set_defaults(overrides=[])


def split_overrides(argv: list[str]) -> tuple[list[tuple[str, str]], list[str]]:
    """Take `--config.a.b=value` and `--config.a.b value` out of `argv`: (name, text) pairs, and what is left.

    Done before argparse, which takes a value with a blank or a leading minus for something else. Raises ConfigError for a missing value.
    """
    overrides, rest = [], []
    tokens = iter(argv)
    for token in tokens:
        if not token.startswith(PREFIX):
            rest.append(token)
            continue
        name, equals, value = token.removeprefix(PREFIX).partition("=")
        if not equals:
            value = next(tokens, None)
            if value is None or value.startswith("--"):
                raise ConfigError(f"{token} needs a value: {token}=VALUE.")
        overrides.append((name, value))
    return overrides, rest


def config_from(args: argparse.Namespace) -> ConfigDict:
    """The locked, validated config of a decoder that the command line asks for. Raises ConfigError."""
    config = validate(load_config(args.config, args.overrides))
    refuse_net(config, args.config)
    return config


def refuse_net(config: ConfigDict, spec: str) -> None:
    """Raises ConfigError where `config`, of `spec`, is one of a small supervised net: commands on decoders cannot read it."""
    if is_net(config):
        raise ConfigError(f"{spec} is of a small net and no decoder: `gammalm figure han-e1` and han-e2 train those.")
