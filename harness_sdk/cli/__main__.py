"""`octopus`: one command line for the services, the runs and the tools.

Each command is a module of this package with `add_arguments(parser)` and `run(args) -> int`;
it is imported only when it is called, so `--help` stays instant.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from harness_sdk.cli.environment import refuse_secrets
from harness_sdk.cli.logs import FORMS, set_up_logging
from harness_sdk.cli.missing import missing_package
from harness_sdk.cli.option_file import parse_command
from harness_sdk.cli.traces import set_up_tracing
from harness_sdk.errors import HarnessError
from harness_sdk.printable import printable

COMMANDS: dict[str, str] = {
    "demo": "train a tiny branching agent on this machine, end to end",
    "up": "start Valkey, the MQTT broker, rollout and trainer on this machine",
    "rollout": "start a rollout service",
    "trainer": "start a trainer service",
    "run": "run an agent folder's tasks as groups of episodes",
    "verifiers": "run a verifiers environment's tasks as groups of episodes",
    "eval": "score an agent folder without training",
    "trees": "merge recorded runs into prefix trees and measure their overlap",
    "template": "probe a chat template: whether and how it is served",
    "view": "draw an episode's DAG as an HTML page or a PNG",
    "watch": "serve a live page of a run: groups, reward, replicas, episodes",
    "secrets": "draw certificates, users and tokens for a deployment",
    "status": "show replicas, versions and the stream in one screen",
    "doctor": "check this machine and its services for common faults",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 0, 1 for an error, 2 for bad usage, 130 for Ctrl-C."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _top_parser()
    args, rest = parser.parse_known_args(arguments[:1])
    if args.command is None:
        parser.print_help()
        return 2
    if not sys.stderr.isatty():
        # Libraries' progress bars are for terminals; a bar whose pipe has closed never lets go of
        # tqdm's lock, and the process never ends.
        os.environ.setdefault("TQDM_DISABLE", "1")
    words = rest + arguments[1:]
    set_up_logging(_log_form(words))
    try:
        refuse_secrets(arguments)
        return _run(args.command, words)
    except HarnessError as error:
        sys.stderr.write(f"octopus {args.command}: {printable(str(error))}\n")
        return 1
    except BrokenPipeError:
        # Whoever read the output has gone; the interpreter would stumble over it once more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        logging.getLogger(__name__).debug("the command failed", exc_info=error)
        sys.stderr.write(f"octopus {args.command}: {printable(str(_file_error(error)))}\n")
        return 1
    except KeyboardInterrupt:
        return 130


def _run(name: str, words: Sequence[str]) -> int:
    sub = argparse.ArgumentParser(prog=f"octopus {name}", description=_sentence(COMMANDS[name]))
    try:
        command = importlib.import_module(f"harness_sdk.cli.{name}")
        command.add_arguments(sub)
        add_log_format(sub)
        parsed = parse_command(sub, words)
        set_up_tracing(name)
        return command.run(parsed)
    except ModuleNotFoundError as error:
        missing = missing_package(name, error)
        if missing is None:
            raise
        raise missing from error


def add_log_format(parser: argparse.ArgumentParser) -> None:
    """Declare the option that every command has."""
    parser.add_argument(
        "--log-format", choices=FORMS, default=FORMS[0], help="how the log is written to stderr"
    )


def _log_form(words: Sequence[str]) -> str:
    """The form asked for, before anything else is parsed: what goes wrong there is logged in it."""
    finder = argparse.ArgumentParser(add_help=False, exit_on_error=False)
    add_log_format(finder)
    try:
        return finder.parse_known_args(words)[0].log_format
    except argparse.ArgumentError:
        # Said again, with the command's usage, once the whole line is parsed.
        return FORMS[0]


def _file_error(error: OSError) -> HarnessError:
    """A file or folder that was named and cannot be used, as one of our errors."""
    if error.filename is None:
        return HarnessError(str(error), remedy="check the disk's room and the machine's limits")
    return HarnessError(
        f"{error.strerror or type(error).__name__}",
        value=os.fsdecode(error.filename) if isinstance(error.filename, bytes) else error.filename,
        remedy="check the path, its permissions and the room on its disk",
    )


def _sentence(text: str) -> str:
    return f"{text[0].upper()}{text[1:]}."


def _top_parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:9} {text}" for name, text in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="octopus",
        description="Agents that branch, and the loop that trains them.",
        epilog=f"commands:\n{lines}\n\n`octopus COMMAND --help` shows a command's options.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", nargs="?", choices=tuple(COMMANDS), metavar="COMMAND")
    return parser


if __name__ == "__main__":
    sys.exit(main())
