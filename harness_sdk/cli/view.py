"""`octopus view`: an episode's DAG as an HTML page or a PNG."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from harness_sdk.cli.episode_stream import reading
from harness_sdk.cli.option_file import render_options
from harness_sdk.cli.settings import add_file_arguments
from harness_sdk.errors import ConfigError, EpisodeNotFound
from harness_sdk.record import BYTES_HASH, EpisodeRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "records",
        nargs="?",
        type=Path,
        metavar="RECORDS",
        help="a records file, as `octopus trees --records` writes it",
    )
    parser.add_argument(
        "--redis-url", "--redis", metavar="URL",
        help="read the episode stream instead of a file",
    )  # fmt: skip
    parser.add_argument("--run", metavar="NAME", help="run whose stream to read; with --redis-url")
    parser.add_argument(
        "--episode",
        default="last",
        metavar="ID|N|last",
        help="which episode: its id, its place from 0, or the last (default)",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR|FILE",
        help="shows text: a tokenizer.json or a folder that holds one",
    )
    parser.add_argument(
        "--out",
        type=Path,
        action="append",
        metavar="FILE",
        help="FILE.html, FILE.svg or FILE.png; may be repeated (default: episode.html)",
    )
    add_file_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Draw one episode and name the files written."""
    if args.dry_run:
        sys.stdout.write(render_options(args))
        return 0
    if (args.records is None) == (args.redis_url is None):
        raise ConfigError(
            "an episode comes from a records file or from a stream",
            value="both" if args.records else "neither",
            remedy="give RECORDS, or --redis-url URL --run NAME",
        )
    if args.redis_url is not None and args.run is None:
        raise ConfigError("a stream belongs to a run", value="no --run", remedy="give --run NAME")
    if args.redis_url is not None:
        record = _stream_episode(args.redis_url, args.run, args.episode)
    else:
        record = _file_episode(args.records, args.episode)
    detokenize = _detokenizer(args.tokenizer, record)
    for path in args.out or [Path("episode.html")]:
        _draw(record, path, detokenize)
        sys.stdout.write(f"episode {record.episode_id}: {path}\n")
    return 0


def pick(records: Iterable[EpisodeRecord], wanted: str) -> EpisodeRecord:
    """The record with the id or the place `wanted`; `last` for the last one.

    Raises:
        EpisodeNotFound: There is none.
    """
    count, last = 0, None
    for record in records:
        if wanted in (record.episode_id, str(count)):
            return record
        count, last = count + 1, record
    if wanted == "last" and last is not None:
        return last
    if not count:
        raise EpisodeNotFound(
            "no such episode",
            value=wanted,
            limit="0 episodes so far",
            remedy="check the name",
        )
    raise EpisodeNotFound(
        "no such episode", value=wanted, limit=f"{count} episodes: an id, 0 to {count - 1}, or last"
    )


def _file_episode(path: Path, wanted: str) -> EpisodeRecord:
    from harness_sdk.records_file import read_records

    if not path.is_file():
        raise ConfigError("no such records file", value=path)
    return pick(read_records(path), wanted)


def _stream_episode(url: str, run: str, wanted: str) -> EpisodeRecord:
    with reading(url, run) as stream:
        if wanted == "last":
            return pick(filter(None, [stream.last()]), wanted)
        return pick(stream.all(), wanted)


def _detokenizer(path: Path | None, record: EpisodeRecord) -> Callable[[Sequence[int]], str] | None:
    """The tokenizer asked for; bytes where the record says that it was written with them."""
    from harness_sdk.trajectories.tokenizers import ByteTokenizer, load_decoder

    if path is not None:
        return load_decoder(path)
    return ByteTokenizer().decode if record.tokenizer_hash == BYTES_HASH else None


def _draw(
    record: EpisodeRecord, path: Path, detokenize: Callable[[Sequence[int]], str] | None
) -> None:
    from harness_sdk.view import episode_html, episode_png, episode_svg

    suffix = path.suffix.lower()
    if suffix not in (".html", ".svg", ".png"):
        raise ConfigError(
            "no picture of that kind", value=path.name, limit=".html, .svg, .png",
            remedy="name the file accordingly",
        )  # fmt: skip
    if not path.parent.is_dir():
        raise ConfigError("no such folder", value=path.parent, remedy="create it first")
    if suffix == ".png":
        episode_png(record, path)
    elif suffix == ".svg":
        path.write_text(episode_svg(record), encoding="utf-8")
    else:
        path.write_text(episode_html(record, detokenize), encoding="utf-8")
