"""What each user of Valkey and of the broker may do, in the files that these servers read."""

from __future__ import annotations

import base64
import hashlib
import secrets
from collections.abc import Mapping

_CONNECT = "+ping +hello +select"
_LOOK = "+exists +get +strlen +hget +hmget +hgetall +hstrlen +xlen +xrange +xrevrange +xread +xinfo"

REDIS_RULES = {
    # Episodes out, adapters in; nothing of what others sent is read back.
    "rollout": "%W~octopus:{run}:episodes %R~octopus:{run}:adapter:*"
    " +xadd +xtrim +get +strlen +hmget +hstrlen"
    " (%R~octopus:{run}:episodes -@all +xinfo|groups +xpending)",
    "trainer": "~octopus:{run}:*"
    " {look} +set +del +hset +hdel +hincrby +lpush +ltrim +multi +exec +discard +watch +unwatch"
    " +scard +xadd +xack +xdel +xtrim +xgroup|create +xreadgroup +xpending +xclaim",
    # A runner counts groups; it neither writes episodes nor reads any.
    "agent": "~octopus:{run}:permits ~octopus:{run}:permits:wake"
    " ~octopus:{run}:permits:running +hget +hmget +hgetall +hincrby +blpop +sadd +srem",
    "monitor": "%R~octopus:{run}:* {look} +xpending +time +config|get +info +memory|usage",
}
"""Keys and commands of each user beside those that every connection needs."""

BROKER_TOPICS = {
    "rollout": ("read octopus/{run}/policy", "write octopus/{run}/replica/+"),
    "trainer": (
        "write octopus/{run}/policy",
        "read octopus/{run}/replica/+",
        "readwrite octopus/{run}/echo/+",
    ),
    "agent": ("read octopus/{run}/policy", "read octopus/{run}/replica/+"),
    "monitor": ("read octopus/{run}/#", "readwrite octopus/doctor/+"),
}
"""Topics of each user; a version is announced by the trainer alone."""

_ROUNDS = 210_000


def valkey_acl(passwords: Mapping[str, str], run: str) -> str:
    """The server's `aclfile`: passwords as sha256, and a user that may but ping.

    Args:
        passwords: Of each user in `REDIS_RULES`.
        run: Run whose keys are reached; `*` is every run's.
    """
    lines = ["user default off resetkeys resetchannels -@all", "user health on nopass -@all +ping"]
    for name, rules in REDIS_RULES.items():
        digest = hashlib.sha256(passwords[name].encode()).hexdigest()
        told = rules.format(run=run, look=_LOOK)
        lines.append(f"user {name} on #{digest} resetchannels -@all {_CONNECT} {told}")
    return "\n".join(lines) + "\n"


def mosquitto_passwords(passwords: Mapping[str, str]) -> str:
    """Mosquitto's `password_file`: PBKDF2 with SHA-512, as `mosquitto_passwd` writes it."""
    return "".join(f"{name}:{_hashed(word)}\n" for name, word in passwords.items())


def mosquitto_acl(run: str) -> str:
    """Mosquitto's `acl_file`.

    Args:
        run: Run whose topics are reached; `+` is every run's.
    """
    lines: list[str] = []
    for name, topics in BROKER_TOPICS.items():
        lines += [f"user {name}", *(f"topic {topic.format(run=run)}" for topic in topics), ""]
    return "\n".join(lines)


def _hashed(password: str) -> str:
    salt = secrets.token_bytes(12)
    digest = hashlib.pbkdf2_hmac("sha512", password.encode(), salt, _ROUNDS, dklen=64)
    salt_text, text = (base64.b64encode(each).decode() for each in (salt, digest))
    return f"$7${_ROUNDS}${salt_text}${text}"
