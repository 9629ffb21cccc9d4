"""Stands in for Valkey with TLS or for Mosquitto in its container, where neither is installed:
`python -m tests.stand_ins valkey|mosquitto` reads the same secrets and listens at the same port.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import shutil
import signal
import sys
import tempfile
from pathlib import Path

from amqtt.broker import Broker
from amqtt.plugins.base import BaseAuthPlugin
from amqtt.session import Session

from tests.tls import server_context, tls_relay, valkey_with_users

SECRETS = Path("/run/secrets")


class MosquittoPasswords(BaseAuthPlugin):
    """Lets in whom Mosquitto's own file of passwords names."""

    async def authenticate(self, *, session: Session) -> bool | None:
        """Whether the session's password hashes to the file's line."""
        for line in (SECRETS / "mosquitto.passwords").read_text().splitlines():
            name, _, told = line.partition(":")
            _, kind, rounds, salt, expected = told.split("$")
            if name == session.username and kind == "7":
                found = hashlib.pbkdf2_hmac(
                    "sha512", (session.password or "").encode(), base64.b64decode(salt), int(rounds)
                )
                return hmac.compare_digest(found, base64.b64decode(expected))
        return False


async def _valkey() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copy(SECRETS / "valkey.acl", folder)
        context = server_context(SECRETS, "valkey")
        async with (
            valkey_with_users(folder) as port,
            tls_relay(port, context, listen=("0.0.0.0", 6379)),
        ):
            await _stopped()


async def _mosquitto() -> None:
    broker = Broker(
        {
            "listeners": {
                "default": {
                    "type": "tcp", "bind": "0.0.0.0:8883", "ssl": True,
                    "certfile": str(SECRETS / "mosquitto.pem"),
                    "keyfile": str(SECRETS / "mosquitto.key"),
                }
            },
            "plugins": {"tests.stand_ins.MosquittoPasswords": {}},
        }
    )  # fmt: skip
    await broker.start()
    await _stopped()
    await broker.shutdown()


async def _stopped() -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    await stop.wait()


if __name__ == "__main__":
    asyncio.run({"valkey": _valkey, "mosquitto": _mosquitto}[sys.argv[1]]())
