"""`octopus secrets`: certificates, users and tokens of a deployment, drawn once into a folder.

Each file holds one secret, so that each service is given what it needs and nothing else:

| file | who reads it |
|---|---|
| `ca.pem` | everybody; `ca.key` stays where it is, to sign more |
| `valkey.pem`, `valkey.key`, `valkey.acl` | Valkey |
| `mosquitto.pem`, `mosquitto.key`, `mosquitto.passwords`, `mosquitto.acl` | Mosquitto |
| `rollout.pem`, `rollout.key`, `tokens`, `redis.rollout`, `mqtt.rollout` | a rollout service |
| `redis.trainer`, `mqtt.trainer` | the trainer |
| `token.agent`, `redis.agent`, `mqtt.agent` | who runs agents |
| `token.monitor`, `redis.monitor`, `mqtt.monitor` | `octopus status`, `octopus watch` |
| `grafana.admin` | Grafana, and who edits its dashboards |
| `token.admin` | nobody, until there is need |
"""

from __future__ import annotations

import argparse
import ipaddress
import re
import secrets
import sys
from pathlib import Path
from urllib.parse import quote

from harness_sdk.cli.option_file import render_options
from harness_sdk.cli.secrets.users import (
    BROKER_TOPICS,
    REDIS_RULES,
    mosquitto_acl,
    mosquitto_passwords,
    valkey_acl,
)
from harness_sdk.cli.settings import add_file_arguments
from harness_sdk.errors import ConfigError

_TOKENS = {"agent": "agent", "monitor": "trainer", "admin": "admin"}
"""Name of a token's holder, and its scope."""
_RUN = re.compile(r"\*|[A-Za-z0-9_-][A-Za-z0-9_.-]*")
_LABEL = r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?"
_NAME = re.compile(rf"(?=.{{1,253}}$)(\*\.)?{_LABEL}(\.{_LABEL})*")
_MAX_DAYS = 36_500


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the command."""
    parser.add_argument("folder", type=Path, metavar="DIR", help="new folder for the files")
    parser.add_argument(
        "--run", default="*", help="the one run whose keys and topics the users reach (all)"
    )
    parser.add_argument(
        "--redis", default="valkey:6379", metavar="HOST:PORT", help="where Valkey is reached"
    )
    parser.add_argument(
        "--mqtt", default="mosquitto:8883", metavar="HOST:PORT", help="where the broker is reached"
    )
    parser.add_argument(
        "--outside", default="localhost", metavar="HOST",
        help="where agents and onlookers reach the servers' published ports (localhost)",
    )  # fmt: skip
    parser.add_argument(
        "--agents", choices=("outside", "inside"), default="outside",
        help="whether agents reach published ports, with the folder's own files, or run beside the"
        " services, with files where services find theirs (outside)",
    )  # fmt: skip
    parser.add_argument(
        "--host", action="append", default=[], metavar="NAME",
        help="a further name or address of the services, for their certificates",
    )  # fmt: skip
    parser.add_argument(
        "--mount", type=Path, default=Path("/run/secrets"), metavar="DIR",
        help="where services find the folder's files (/run/secrets, as in compose.yaml)",
    )  # fmt: skip
    parser.add_argument("--days", type=int, default=730, help="how long certificates hold (730)")
    add_file_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Draw everything, where nothing is yet."""
    if args.dry_run:
        sys.stdout.write(render_options(args))
        return 0
    _check(args)
    from harness_sdk.cli.secrets.certificates import Authority

    _make_folder(args.folder)
    authority = Authority(days=args.days)
    files = authority.files()
    for service, names in {
        "valkey": ["valkey", _host(args.redis)],
        "mosquitto": ["mosquitto", _host(args.mqtt)],
        "rollout": ["rollout", "rollout-1"],
    }.items():
        hosts = dict.fromkeys([*names, args.outside, *args.host, "localhost", "127.0.0.1"])
        files |= authority.issue(service, list(hosts))
    files |= _redis_files(args) | _broker_files(args) | _token_files()
    for name, data in files.items():
        path = args.folder / name
        path.write_bytes(data)
        # Containers read single files as users of their own, whatever the umask was here; the
        # folder keeps others out.
        path.chmod(0o600 if name == "ca.key" else 0o644)
    sys.stdout.write(f"{len(files)} files in {args.folder}; keep ca.key off the nodes\n")
    return 0


def _check(args: argparse.Namespace) -> None:
    """Refuse what would draw rules or certificates that nobody wants, or that do not work.

    Raises:
        ConfigError: With the option's name.
    """
    # A space or a star in it would give a user more than the one run.
    if not _RUN.fullmatch(args.run):
        raise _refused("run", args.run, "letters, digits, _, - and dots, or * for all")
    if not 1 <= args.days <= _MAX_DAYS:
        raise _refused("days", args.days, f"1 to {_MAX_DAYS}")
    for option in ("redis", "mqtt"):
        place = getattr(args, option)
        port = place.rpartition(":")[2]
        if not (
            _is_host(_host(place)) and re.fullmatch("[0-9]{1,5}", port) and 1 <= int(port) <= 65_535
        ):
            raise _refused(option, place, "HOST:PORT, a port of 1 to 65535")
    for option, hosts in (("outside", [args.outside]), ("host", args.host)):
        for host in hosts:
            if not _is_host(host):
                raise _refused(option, host, "a host's name, an address, or for --host *.NAME")


def _refused(option: str, value: object, limit: str) -> ConfigError:
    return ConfigError(
        f"--{option} cannot be used", value=repr(value), limit=limit, remedy=f"correct --{option}"
    )


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return _NAME.fullmatch(text) is not None
    return True


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(mode=0o700, parents=True)
    except FileExistsError as error:
        if any(folder.iterdir()):
            raise ConfigError(
                "the folder holds files, and secrets are drawn once",
                value=folder,
                remedy="name a new folder; services take its secrets when they start again",
            ) from error
        folder.chmod(0o700)


def _redis_files(args: argparse.Namespace) -> dict[str, bytes]:
    passwords = {name: secrets.token_urlsafe(32) for name in REDIS_RULES}
    urls = {
        f"redis.{name}": _url(args, "rediss", name, word, args.redis, "/0")
        for name, word in passwords.items()
    }
    return _encoded({**urls, "valkey.acl": valkey_acl(passwords, args.run)})


def _broker_files(args: argparse.Namespace) -> dict[str, bytes]:
    passwords = {name: secrets.token_urlsafe(32) for name in BROKER_TOPICS}
    urls = {
        f"mqtt.{name}": _url(args, "mqtts", name, word, args.mqtt, "")
        for name, word in passwords.items()
    }
    run = "+" if args.run == "*" else args.run
    return _encoded(
        {
            **urls,
            "mosquitto.passwords": mosquitto_passwords(passwords),
            "mosquitto.acl": mosquitto_acl(run),
        }
    )


def _token_files() -> dict[str, bytes]:
    tokens = {name: secrets.token_urlsafe(32) for name in _TOKENS}
    rows = [f"{name} {scope} {tokens[name]}\n" for name, scope in _TOKENS.items()]
    single = {f"token.{name}": f"{token}\n" for name, token in tokens.items()}
    grafana = secrets.token_urlsafe(32)
    return _encoded({**single, "tokens": "".join(rows), "grafana.admin": grafana})


def _url(
    args: argparse.Namespace, scheme: str, user: str, password: str, place: str, path: str
) -> str:
    folder = args.mount
    if user == "monitor" or (user == "agent" and args.agents == "outside"):
        host = f"[{args.outside}]" if ":" in args.outside else args.outside
        place = f"{host}:{place.rpartition(':')[2]}"
        folder = args.folder.resolve()
    ca = quote(str(folder / "ca.pem"))
    return f"{scheme}://{user}:{password}@{place}{path}?ssl_ca_certs={ca}\n"


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")


def _encoded(files: dict[str, str]) -> dict[str, bytes]:
    return {name: text.encode() for name, text in files.items()}
