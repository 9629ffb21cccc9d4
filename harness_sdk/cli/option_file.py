"""Commands whose options are their settings: a TOML file gives what no flag does.

Keys are the options' names with underscores, and a positional argument's name. As for the services:
defaults < file < environment < flags.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness_sdk.cli.environment import ENVIRONMENT, variable
from harness_sdk.cli.settings import (
    FORMS,
    parse_arguments,
    read_toml,
    render_masked,
    shown,
    unknown_key,
)
from harness_sdk.errors import ConfigError
from harness_sdk.json_values import is_array

_OWN = ("help", "config", "dry_run", "log_format")
_KINDS: dict[Any, tuple[str, type | tuple[type, ...]]] = {
    None: ("a string", str),
    Path: ("a string", str),
    int: ("an integer", int),
    float: ("a number", (int, float)),
}


def parse_command(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command's line: overrides as `parse_arguments`, or the options' own file.

    Args:
        parser: With `add_config_arguments`, with `add_file_arguments`, or with neither.
        argv: The words behind the command.

    Raises:
        ConfigError: The options' file cannot be read, or has an unknown key or a wrong value.
    """
    words = _explicit_form(argv)
    takes_file = any(action.dest == "config" for action in parser._actions)
    if not takes_file or parser.get_default("overrides") is not None:
        return parse_arguments(parser, words)
    finder = argparse.ArgumentParser(prog=parser.prog, add_help=False)
    finder.add_argument("--config", type=Path)
    path = finder.parse_known_args(words)[0].config
    return _parse_with(parser, words, read_toml(path) if path is not None else {})


def render_options(args: argparse.Namespace) -> str:
    """What `--dry-run` prints: every option's value, passwords masked."""
    data = {key: _plain(value) for key, value in vars(args).items() if key not in _OWN}
    return render_masked(data, args.dry_run)


def _explicit_form(argv: Sequence[str]) -> list[str]:
    """`--dry-run` with its form, so that it does not take a positional argument for one."""
    words = list(argv)
    end = words.index("--") if "--" in words else len(words)
    for at, word in enumerate(words[:end]):
        if word == "--dry-run" and words[at + 1 : at + 2] not in ([form] for form in FORMS):
            words[at] = f"--dry-run={FORMS[0]}"
    return words


def _parse_with(
    parser: argparse.ArgumentParser, words: Sequence[str], data: dict[str, Any]
) -> argparse.Namespace:
    actions = {each.dest: each for each in parser._actions if each.dest not in _OWN}
    lists: dict[str, list[Any]] = {}
    for key, found in data.items():
        if key not in actions:
            raise unknown_key(list(actions), (key,), found)
        action = actions[key]
        value = _checked(action, found)
        source = f"OCTOPUS_{key.upper()}"
        if source in ENVIRONMENT and action.default and action.default == variable(source):
            continue
        if isinstance(value, list):
            lists[key] = value
            if value and action.nargs == "+":
                action.nargs, action.required = "*", False
        else:
            parser.set_defaults(**{key: value})
    args = parser.parse_args(words)
    for key, value in lists.items():
        # As a default, a repeated flag would add to it instead of taking its place.
        if not getattr(args, key):
            setattr(args, key, value)
    return args


def _checked(action: argparse.Action, value: Any) -> Any:
    """A file's value as the option itself would give it."""
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise _wrong(action.dest, value, "true or false")
        return value
    kind, types = _KINDS[action.type]
    if not _is_list(action):
        return _scalar(action, value, kind, types)
    if not is_array(value):
        raise _wrong(action.dest, value, f"an array, each item {kind}")
    return [_scalar(action, item, kind, types) for item in value]


def _scalar(action: argparse.Action, value: Any, kind: str, types: type | tuple[type, ...]) -> Any:
    # TOML's true is no number, though Python's is.
    if isinstance(value, bool) or not isinstance(value, types):
        raise _wrong(action.dest, value, kind)
    return action.type(value) if callable(action.type) else value


def _is_list(action: argparse.Action) -> bool:
    # Its class has no public name.
    return action.nargs == "+" or type(action).__name__ == "_AppendAction"


def _wrong(key: str, value: Any, limit: str) -> ConfigError:
    return ConfigError(
        f"{key} is not valid",
        value=shown(key, value),
        limit=limit,
        remedy=f"change {key} in the file",
    )


def _plain(value: Any) -> Any:
    if is_array(value):
        return [_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value
