"""`octopus demo`: a tiny branching agent, warmed up and trained online on this machine."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from harness_sdk.cli.interrupts import run_interruptible
from harness_sdk.cli.settings import add_config_arguments, load_config, render_config

if TYPE_CHECKING:
    from harness_sdk.cli.demo.config import DemoConfig
    from harness_sdk.cli.demo.figures import Figures


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from harness_sdk.cli.demo.config import DemoConfig

    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there too")
    add_config_arguments(parser, DemoConfig)


def run(args: argparse.Namespace) -> int:
    """Train, report; 0 when it ran and, at full length, met its targets, else 1."""
    from harness_sdk.cli.demo.config import DemoConfig

    config = load_config(DemoConfig, args.config, args.overrides)
    if args.dry_run:
        sys.stdout.write(render_config(config, args.dry_run))
        return 0
    # Progress goes to stdout; what the services log is in the run's folder.
    logging.getLogger().setLevel(logging.WARNING)
    try:
        figures = run_interruptible(_run(config))
    except KeyboardInterrupt:
        sys.stderr.write("octopus demo: stopped\n")
        return 130
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(figures.as_dict(), indent=2) + "\n", "utf-8")
    return _verdict(config, figures)


async def _run(config: DemoConfig) -> Figures:
    from harness_sdk.cli.demo.figures import Figures
    from harness_sdk.cli.demo.phases import run_phases
    from harness_sdk.cli.demo.progress import Progress
    from harness_sdk.cli.demo.report import write_report

    progress = Progress()
    gallery, restarts = await run_phases(config, progress)
    figures = Figures.of(
        progress.steps, restarts=restarts, seconds=progress.elapsed_s, engine=config.engine
    )
    path = await asyncio.to_thread(write_report, config, figures, progress.steps, gallery)
    progress.tell(f"report in {path}")
    return figures


def _verdict(config: DemoConfig, figures: Figures) -> int:
    """The table, and what was missed."""
    width = max(len(name) for name, _ in figures.rows())
    lines = [f"  {name:<{width}}  {value}" for name, value in figures.rows()]
    sys.stdout.write("\n" + "\n".join(lines) + "\n")
    missed = figures.missed() if config.is_full else []
    if missed:
        sys.stderr.write(f"octopus demo: missed: {'; '.join(missed)}\n")
    return 1 if missed else 0
