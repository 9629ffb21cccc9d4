"""`octopus doctor`: common faults of this machine and its services, each with a remedy."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from harness_sdk.cli.doctor.check import Check
from harness_sdk.cli.environment import add_url_arguments
from harness_sdk.cli.option_file import render_options
from harness_sdk.cli.settings import add_file_arguments

__all__ = ["Check", "add_arguments", "checks", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    add_url_arguments(parser, "server to check", ", else the embedded one")
    parser.add_argument("--model", type=Path, help="checkpoint folder to check")
    parser.add_argument("--adapter", type=Path, help="folder of a LoRA adapter for the model")
    parser.add_argument("--folder", type=Path, default=Path("runs"), help="folder of the runs")
    parser.add_argument(
        "--port", type=int, action="append", metavar="PORT",
        help="port that a service will bind; may be repeated (default 7040)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_file_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print one line a check; 1 where one failed, 0 where all is well or a warning at most."""
    if args.dry_run:
        sys.stdout.write(render_options(args))
        return 0
    found: list[Check] = []
    for check in checks(args):
        found.append(check)
        if not args.json:
            sys.stdout.write(check.line() + "\n")
            sys.stdout.flush()
    if args.json:
        sys.stdout.write(json.dumps([asdict(check) for check in found], indent=2) + "\n")
    return 1 if any(check.level == "fail" for check in found) else 0


def checks(args: argparse.Namespace) -> Iterator[Check]:
    """Every check that `args` asks for, in order."""
    from harness_sdk.cli.doctor import machine, model, packages, servers

    yield from packages.check_packages()
    yield machine.check_disk(args.folder)
    yield machine.check_permissions(args.folder)
    for port in args.port or [7040]:
        yield machine.check_port(port)
    yield from machine.check_gpus(args.model)
    if not packages.is_sdk_alone():
        yield from servers.check_redis(args.redis_url)
        yield servers.check_broker(args.mqtt_url)
        yield servers.check_clock(args.redis_url)
    if args.model is not None:
        yield from model.check_model(args.model)
    if args.adapter is not None:
        yield from model.check_adapter(args.adapter, args.model)
