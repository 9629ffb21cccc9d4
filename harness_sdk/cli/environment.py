"""Addresses and secrets: from a variable, or from the file that `VARIABLE_FILE` names.

A command line is no place for one: every process of the machine can read it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from harness_sdk.errors import ConfigError
from harness_sdk.masking import SECRET_KEY, masked_url

ENVIRONMENT = ("OCTOPUS_REDIS_URL", "OCTOPUS_MQTT_URL", "OCTOPUS_TOKEN")
"""The variables that are read; each has its `_FILE`."""


_MAX_BYTES = 64 * 1024


def variable(name: str, environment: Mapping[str, str] | None = None) -> str | None:
    """The value of `name`, or the text of the file that `name_FILE` names; None where neither is.

    Args:
        name: One of `ENVIRONMENT`.
        environment: Variables to read; None takes the process's own.

    Raises:
        ConfigError: Both are set, or the file is none, is empty or is too large.
    """
    variables = os.environ if environment is None else environment
    value, path = variables.get(name), variables.get(f"{name}_FILE")
    if not path:
        return value or None
    if value:
        raise ConfigError(
            f"{name} and {name}_FILE are both set", value=path, remedy="unset one of them"
        )
    return _secret(name, Path(path))


def add_url_arguments(parser: argparse.ArgumentParser, what: str, otherwise: str = "") -> None:
    """Declare `--redis-url` and `--mqtt-url`, which the environment sets where they are not given.

    Args:
        parser: Of a command.
        what: What an address is to it, for the help.
        otherwise: What it takes where there is neither.
    """
    for name, source in (("redis", "OCTOPUS_REDIS_URL"), ("mqtt", "OCTOPUS_MQTT_URL")):
        parser.add_argument(
            f"--{name}-url", default=variable(source), metavar="URL",
            help=f"{what}; {source} where it is not given{otherwise}",
        )  # fmt: skip


def refuse_secrets(argv: Sequence[str]) -> None:
    """Refuse a command line that holds a secret.

    Raises:
        ConfigError: It sets a token, or an address with a password.
    """
    for word in argv:
        flag, _, _ = word.partition("=")
        if flag.startswith("--") and SECRET_KEY.search(flag[2:].replace("-", "_")):
            raise _shows_a_secret(flag, "OCTOPUS_TOKEN")
        if masked_url(word) != word:
            names = "OCTOPUS_REDIS_URL or OCTOPUS_MQTT_URL"
            raise _shows_a_secret(masked_url(word), names)


def _secret(name: str, path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_BYTES + 1)
        text = data.decode("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8"
        raise ConfigError(
            f"cannot read the file of {name}_FILE", value=path, remedy=f"check it: {reason}"
        ) from error
    if not text or len(data) > _MAX_BYTES:
        raise ConfigError(
            f"the file of {name}_FILE holds no secret",
            value=f"{path}, {len(data)} bytes",
            limit=f"1 to {_MAX_BYTES} bytes",
            remedy="write the value alone into it",
        )
    return text


def _shows_a_secret(given: str, names: str) -> ConfigError:
    return ConfigError(
        "a secret on a command line is seen by every process of the machine",
        value=given,
        remedy=f"set {names}, or the same with _FILE to the path of a file that holds it",
    )
