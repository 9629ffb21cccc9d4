"""`octopus status`: replicas, versions, memory, the stream, policy and step on one screen."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from harness_sdk.cli.environment import add_url_arguments, variable
from harness_sdk.cli.option_file import render_options
from harness_sdk.cli.settings import add_file_arguments
from harness_sdk.cli.tls_arguments import add_tls_arguments, tls_options
from harness_sdk.errors import ConfigError, HarnessError
from harness_sdk.printable import printable

if TYPE_CHECKING:
    from harness_sdk.control import ReplicaState
    from harness_sdk.options import TlsOptions


_RECOMPUTED = "tokens/recomputed_"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--run", default="local", help="name of the run")
    add_url_arguments(parser, "address")
    parser.add_argument(
        "--address", action="append", default=[], metavar="HOST:PORT",
        help="a replica to ask beside those that the control bus knows",
    )  # fmt: skip
    add_tls_arguments(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_file_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the state; 1 where something that was named cannot be reached, or has no engine."""
    if args.dry_run:
        sys.stdout.write(render_options(args))
        return 0
    if not (args.redis_url or args.mqtt_url or args.address):
        raise ConfigError(
            "nothing to ask", remedy="give --mqtt-url, --redis-url or --address, as `octopus up`"
            " prints them, or set OCTOPUS_MQTT_URL and OCTOPUS_REDIS_URL",
        )  # fmt: skip
    state = asyncio.run(_collect(args))
    sys.stdout.write(json.dumps(state, indent=2) + "\n" if args.json else _screen(state))
    return 1 if state["errors"] else 0


async def _collect(args: argparse.Namespace) -> dict[str, Any]:
    state: dict[str, Any] = {
        "run": args.run, "stream": None, "step": None, "policy": None, "replicas": [],
        "errors": [],
    }  # fmt: skip
    known: list[ReplicaState] = []
    if args.redis_url:
        from rollout_service.redis_state import read_newest_step, read_stream_state

        try:
            state["stream"] = asdict(await read_stream_state(args.redis_url, args.run))
            state["step"] = await read_newest_step(args.redis_url, args.run)
        except HarnessError as error:
            state["errors"].append(str(error))
    if args.mqtt_url:
        from rollout_service.bus import read_bus_state

        try:
            bus = await read_bus_state(args.mqtt_url, args.run)
            known += bus.replicas
            state["policy"] = asdict(bus.policy) if bus.policy is not None else None
        except HarnessError as error:
            state["errors"].append(str(error))
    token = variable("OCTOPUS_TOKEN")
    tls = tls_options(args.tls_ca, args.tls_cert, args.tls_key)
    found = {replica.address for replica in known if replica.alive}
    state["replicas"] = [
        *await asyncio.gather(*(replica_status(each.address, each, token, tls) for each in known)),
        *await asyncio.gather(
            *(replica_status(each, None, token, tls) for each in args.address if each not in found)
        ),
    ]
    state["errors"] += [each["unreachable"] for each in state["replicas"] if each["unreachable"]]
    state["errors"] += filter(None, map(_engine_error, state["replicas"]))
    return state


async def replica_status(
    address: str, known: ReplicaState | None, token: str | None, tls: TlsOptions | None
) -> dict[str, Any]:
    """What the control bus and the replica itself say."""
    replica: dict[str, Any] = {
        "replica_id": known.replica_id if known is not None else "",
        "address": address,
        "alive": known.alive if known is not None else True,
        "versions": list(known.versions) if known is not None else [],
        "error": known.error if known is not None else "",
        "waiting_version": known.waiting_version if known is not None else 0,
        "waiting_for": known.waiting_for if known is not None else "",
        "waiting_s": known.waiting_s if known is not None else 0.0,
        "unreachable": "",
        "status": None,
    }
    if not replica["alive"] or not address:
        return replica
    from harness_sdk.client import OctopusClient
    from harness_sdk.options import RetryPolicy, Timeouts

    try:
        async with OctopusClient.connect(
            address,
            token=token,
            tls=tls,
            timeouts=Timeouts(connect_s=3, call_s=3),
            retry=RetryPolicy(max_attempts=1),
        ) as client:
            status = asdict(await client.status())
    except HarnessError as error:
        return {**replica, "unreachable": f"{address}: {error}"}
    return {
        **replica,
        "replica_id": status["replica_id"],
        "versions": list(status["policy_versions"]),
        "status": status,
    }


def _engine_error(replica: dict[str, Any]) -> str:
    """Why a replica that answers computes nothing now; empty where it does."""
    metrics: Mapping[str, float] = replica["status"]["metrics"] if replica["status"] else {}
    if metrics.get("engine/serving", 1):
        return ""
    return (
        f"{replica['replica_id']}: its engine has ended and is started again,"
        f" after {metrics.get('engine/restarts', 0):.0f} restarts before"
    )


def _screen(state: dict[str, Any]) -> str:
    lines = [f"run        {state['run']}"]
    policy = state["policy"]
    if policy is not None:
        lines.append(
            f"policy     version {policy['version']}, rank {policy['rank']},"
            f" {policy['num_tensors']} tensors, sha256 {policy['sha256'][:12]}"
        )
    stream = state["stream"]
    if stream is not None:
        lines.append(
            f"episodes   {stream['length']} in the stream, {stream['undelivered']} undelivered,"
            f" {stream['pending']} pending, {stream['dead']} dead"
            + (f" ({stream['dead_trimmed']} older ones gone)" if stream["dead_trimmed"] else "")
        )
    if state["step"] is not None:
        lines.append(_step_line(state["step"]))
    lines.append(f"replicas   {len(state['replicas'])}")
    for replica in state["replicas"]:
        lines += [f"  {line}" for line in _replica_lines(replica)]
    lines += [f"error      {error}" for error in state["errors"]]
    # What replicas and clients said is in them.
    return "\n".join(printable(line) for line in lines) + "\n"


def _step_line(step: dict[str, Any]) -> str:
    """The trainer's newest step; a figure that it did not report is left out."""
    told = [f"step {step.get('step', '?')}"]
    for name, label in (("reward/mean", "reward"), ("dropped/total", "dropped episodes")):
        if isinstance(step.get(name), int | float):
            told.append(f"{label} {step[name]:.4g}")
    if isinstance(step.get("time_s"), int | float):
        told.append(f"{max(time.time() - step['time_s'], 0):.0f} s ago")
    return f"trainer    {', '.join(told)}"


def _replica_lines(replica: dict[str, Any]) -> list[str]:
    name = replica["replica_id"] or replica["address"]
    if not replica["alive"]:
        return [f"{name}  gone"]
    lines = [f"{name}  {replica['address']}  versions {', '.join(map(str, replica['versions']))}"]
    status = replica["status"]
    if status is not None:
        lines.append(
            f"    {status['engine']}, {status['model']}, up {status['uptime_s']:.0f} s:"
            f" {status['open_episodes']} episodes open, {status['queued_episodes']} queued,"
            f" {status['live_threads']} threads"
        )
        lines.append(
            f"    KV use {status['kv_use']:.1%}: {status['tokens_resident']} of"
            f" {status['tokens_capacity']} tokens, {status['resident_cursors']} cursors,"
            f" {status['recurrent_slots']} recurrent states"
        )
        lines.append(f"    {_token_line(status['metrics'])}")
    if replica["waiting_version"]:
        lines.append(
            f"    version {replica['waiting_version']} waits for a slot, for"
            f" {replica['waiting_s']:.0f} s and more: {replica['waiting_for']}"
        )
    if replica["error"]:
        lines.append(f"    refused: {replica['error']}")
    return lines


def _token_line(metrics: Mapping[str, float]) -> str:
    """Tokens computed and sampled since the start, and what was computed twice, by cause."""
    twice = {
        name.removeprefix(_RECOMPUTED): count
        for name, count in metrics.items()
        if name.startswith(_RECOMPUTED) and count
    }
    causes = ", ".join(f"{count:.0f} by {cause}" for cause, count in sorted(twice.items()))
    return (
        f"tokens {metrics.get('tokens/computed', 0):.0f} computed,"
        f" {metrics.get('tokens/sampled', 0):.0f} sampled, recomputed {causes or 'none'}"
    )
