"""`octopus rollout`: one replica of the rollout service."""

from __future__ import annotations

import argparse
import asyncio
import sys

from harness_sdk.cli.settings import add_config_arguments, load_config, render_config


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from rollout_service.config import RolloutConfig

    add_config_arguments(parser, RolloutConfig)


def run(args: argparse.Namespace) -> int:
    """Serve until SIGINT or SIGTERM."""
    from rollout_service.config import RolloutConfig

    config = load_config(RolloutConfig, args.config, args.overrides)
    if args.dry_run:
        sys.stdout.write(render_config(config, args.dry_run))
        return 0
    config.require_engine()
    # torch, and transformers or vLLM, are imported from here on.
    from rollout_service.service import run_service

    asyncio.run(run_service(config))
    return 0
