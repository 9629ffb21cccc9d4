"""`octopus up`: Valkey, MQTT broker, rollout and trainer on this machine, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import signal
import sys
from typing import TYPE_CHECKING

from harness_sdk.cli.models import resolve_model, rollout_for_model
from harness_sdk.cli.settings import add_config_arguments, load_config, render_config, render_toml
from harness_sdk.cli.stack import LocalStack
from harness_sdk.cli.stack_layout import replica_plans, trainer_plan
from harness_sdk.cli.watch.beside import page_beside
from harness_sdk.masking import masked_url

if TYPE_CHECKING:
    from harness_sdk.cli.stack_config import StackConfig
    from harness_sdk.cli.stack_layout import ServicePlan


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    from harness_sdk.cli.stack_config import StackConfig

    add_config_arguments(parser, StackConfig)


def run(args: argparse.Namespace) -> int:
    """Start everything and keep it running; 0 after Ctrl-C or SIGTERM."""
    from harness_sdk.cli.stack_config import StackConfig

    config = load_config(StackConfig, args.config, args.overrides)
    suited = rollout_for_model(config.model, config.rollout)
    config = config.model_copy(update={"rollout": suited})
    # Faults of either service's settings show before anything starts.
    plans = [*replica_plans(config), *([trainer_plan(config)] if config.with_trainer else [])]
    if args.dry_run:
        sys.stdout.write(render_config(config, args.dry_run))
        if args.dry_run == "toml":
            for plan in plans:
                sys.stdout.write(f"\n{_shown(config, plan)}\n{render_toml(plan.settings)}")
        return 0
    config = config.model_copy(update={"model": resolve_model(config.model)})
    return asyncio.run(_up(config))


def _shown(config: StackConfig, plan: ServicePlan) -> str:
    """Comments that say how a service is started."""
    path = config.run_folder / f"{plan.name}.toml"
    variables = [f"{name}={value}" for name, value in plan.environment().items()]
    return f"# {path}: {' '.join([*variables, 'python', *plan.argv(path)[1:]])}"


async def _up(config: StackConfig) -> int:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(_serve(config))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopped], return_when=asyncio.FIRST_COMPLETED)
    stopped.cancel()
    serving.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await serving
    sys.stdout.write("stopped\n")
    return 0


async def _serve(config: StackConfig) -> None:
    openai_ports = [plan.settings["openai"]["port"] for plan in replica_plans(config)]
    async with LocalStack(config) as stack, page_beside(config, stack) as page:
        lines = [
            f"redis    {masked_url(stack.redis_url)}",
            f"mqtt     {masked_url(stack.mqtt_url)}",
            *(f"rollout  {address}" for address in stack.addresses),
            *(f"openai   http://127.0.0.1:{port}/v1" for port in openai_ports if port),
            *([f"page     {page}"] if page else []),
            f"logs     {', '.join(str(stack.log_path(name)) for name in stack.processes)}",
            f"run      {config.run}; Ctrl-C stops everything",
        ]
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
        await stack.supervise()
