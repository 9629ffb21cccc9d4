"""The command reference, from the parsers themselves."""

from __future__ import annotations

import argparse
import importlib
import os
from collections.abc import Iterator
from unittest import mock

from handbook.configuration import COMMAND_MODELS
from handbook.tables import code, table
from harness_sdk.cli.__main__ import COMMANDS, add_log_format
from harness_sdk.cli.settings import ENVIRONMENT

_HEAD = """# Commands

Every command has `--help`, `--config FILE` (TOML), `--log-format text|json` for the log on stderr,
and `--dry-run`, which prints the resolved settings and exits. The exit status is 0, 1 for an error,
2 for a wrong command line, 130 after Ctrl-C. An error names the value, the limit and the remedy.
"""

_SHARED = ("help", "config", "dry_run", "log_format")


def commands_page() -> str:
    """The page."""
    lines = [_HEAD]
    for name in COMMANDS:
        lines += _command(name)
    return "\n".join(lines) + "\n"


def parser_of(name: str) -> argparse.ArgumentParser:
    """A command's parser, as `octopus NAME` makes it."""
    parser = argparse.ArgumentParser(prog=f"octopus {name}")
    # Some defaults are variables of whoever builds the page.
    with mock.patch.dict(os.environ):
        for variable in ENVIRONMENT:
            os.environ.pop(variable, None)
        importlib.import_module(f"harness_sdk.cli.{name}").add_arguments(parser)
    add_log_format(parser)
    return parser


def _command(name: str) -> Iterator[str]:
    parser = parser_of(name)
    text = COMMANDS[name]
    yield from (f"## octopus {name}", "", f"{text[0].upper()}{text[1:]}.", "")
    own = [action for action in parser._actions if action.dest not in _SHARED]
    settings = ["[--SETTING VALUE ...]"] if name in COMMAND_MODELS else []
    words = " ".join(["octopus", name, *(_written(action) for action in own), *settings])
    yield from ("```text", words, "```", "")
    if own:
        yield from table(
            ["argument", "default", "meaning"],
            [[code(_spelled(each)), _default(each), each.help or ""] for each in own],
        )
    if name in COMMAND_MODELS:
        yield f"Settings: [octopus {name}](configuration.md#octopus-{name})."
        yield ""


def _written(action: argparse.Action) -> str:
    """An argument in the usage line."""
    name = _spelled(action)
    if action.option_strings:
        return f"[{name}]"
    return f"[{name}]" if action.nargs == "?" else f"{name} ..." if action.nargs == "+" else name


def _spelled(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.metavar or action.dest)
    takes = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return action.option_strings[0] + takes


def _default(action: argparse.Action) -> str:
    if action.default in (None, False, argparse.SUPPRESS) or action.default in ([], {}, ()):
        return ""
    return code(str(action.default))
