"""`octopus watch`: the live page of a run, by itself here, or as part of `octopus up`.

Where each pane has its figures from; nothing is written to any source:

| pane | source |
|---|---|
| sources | this process's own connections; the times in the newest step and episode |
| trainer's figures, curves, steps | Redis stream `octopus:{run}:steps`, which the trainer writes |
| groups | the records of the episodes kept here |
| groups begun and permitted | Redis hash `octopus:{run}:permits` |
| episodes, their DAGs and tokens | Redis stream `octopus:{run}:episodes`, kept as they pass by |
| waiting, pending, dead | the consumer group of that stream, and `octopus:{run}:dead` |
| policy, versions, refusals | retained MQTT `octopus/{run}/policy`, `./replica/+` |
| KV use, threads, sampled tokens | the Status call of each live replica, while a page is open |

`sources.py` follows them into one `Board`; `panes.py` turns the board into cells of text; the
server sends those that changed as server-sent events, and the page only places them.
Memory is bounded: see `board.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from harness_sdk.cli.environment import add_url_arguments, variable
from harness_sdk.cli.interrupts import run_interruptible
from harness_sdk.cli.option_file import render_options
from harness_sdk.cli.settings import add_file_arguments
from harness_sdk.cli.tls_arguments import add_tls_arguments, tls_options
from harness_sdk.errors import ConfigError

_MAX_EPISODES = 20_000


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("--run", default="local", help="name of the run")
    add_url_arguments(parser, "address")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR|FILE",
        help="shows text: a tokenizer.json or a folder that holds one",
    )
    parser.add_argument(
        "--host", default="127.0.0.1",
        help="address to bind; whoever reaches it reads every prompt (default: this machine alone)",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=0, help="port to bind; 0 takes a free one")
    parser.add_argument(
        "--episodes", type=int, default=1000, metavar="N", help="newest episodes kept (1000)"
    )
    add_tls_arguments(parser)
    add_file_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C or SIGTERM."""
    if args.dry_run:
        sys.stdout.write(render_options(args))
        return 0
    if not (args.redis_url or args.mqtt_url):
        raise ConfigError(
            "nothing to watch", remedy="give --redis-url and --mqtt-url, as `octopus up` prints"
            " them, or set OCTOPUS_REDIS_URL and OCTOPUS_MQTT_URL",
        )  # fmt: skip
    if not 1 <= args.episodes <= _MAX_EPISODES:
        raise ConfigError(
            "--episodes is out of bounds", value=args.episodes, limit=f"1 to {_MAX_EPISODES}"
        )
    try:
        run_interruptible(_serve(args))
    except KeyboardInterrupt:
        sys.stdout.write("stopped\n")
    return 0


async def _serve(args: argparse.Namespace) -> None:
    from harness_sdk.cli.watch.server import watching

    async with watching(
        args.run,
        redis_url=args.redis_url,
        mqtt_url=args.mqtt_url,
        tokenizer=args.tokenizer,
        host=args.host,
        port=args.port,
        max_episodes=args.episodes,
        token=variable("OCTOPUS_TOKEN"),
        tls=tls_options(args.tls_ca, args.tls_cert, args.tls_key),
    ) as url:
        sys.stdout.write(f"page     {url}\nrun      {args.run}; Ctrl-C stops the page alone\n")
        sys.stdout.flush()
        await asyncio.Event().wait()
