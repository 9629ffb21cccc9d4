"""Who may call what: bearer tokens, their scopes, and whose episodes a call may touch.

An agent reaches what it opened itself, a trainer looks on, an administrator reaches every episode
by its id over gRPC. A session of the OpenAI-compatible endpoint is found by its owner's name and
its own, so there everybody, an administrator too, reaches those of their own name alone.
Nobody pushes an adapter here: versions come over the control bus alone.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness_sdk.errors import AuthError, ConfigError

MIN_TOKEN_LENGTH = 16
"""Characters of a token in a file of tokens."""
_MAX_BYTES = 1 << 20
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Scope(StrEnum):
    """What the holder of a token may do."""

    AGENT = "agent"
    """Open episodes, and call what it opened."""
    TRAINER = "trainer"
    """Handshake and status."""
    ADMIN = "admin"
    """Every call over gRPC, in every episode; over HTTP the sessions of its own name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who calls."""

    name: str
    """Owner of the episodes that it opens; several tokens may share it."""
    scope: Scope

    @property
    def reaches(self) -> str | None:
        """Owner whose episodes it may call over gRPC; None is everybody's."""
        return None if self.scope is Scope.ADMIN else self.name

    def require(self, call: str) -> None:
        """Refuse `call`, a method's name, where the scope does not hold it.

        Raises:
            AuthError: It does not.
        """
        if self.scope is Scope.TRAINER and call not in ("Connect", "Status"):
            raise AuthError(
                "the token's scope does not hold this call",
                value=f"{call} by {self.name}, scope {self.scope}",
                limit="Connect, Status",
                remedy="use a token of scope agent",
            )


ANYBODY = Caller(name="", scope=Scope.ADMIN)
"""Who calls where no token is asked for, or the one token that everybody shares is given."""


class Access:
    """The tokens of a service.

    Args:
        shared: A token of scope admin; None has none.
        named: Token and its holder.
    """

    def __init__(self, shared: str | None = None, named: Iterable[tuple[str, Caller]] = ()) -> None:
        tokens = [*named, *([(shared, ANYBODY)] if shared else [])]
        self._callers = [(_digest(token), caller) for token, caller in tokens]

    @property
    def is_open(self) -> bool:
        """Whether no token is asked for."""
        return not self._callers

    def caller(self, authorization: str) -> Caller:
        """Who sends this `authorization` header.

        Every token is compared, by its digest and in constant time.

        Raises:
            AuthError: It is nobody's.
        """
        if self.is_open:
            return ANYBODY
        given = _digest(authorization.removeprefix("Bearer "))
        found = [each for token, each in self._callers if hmac.compare_digest(token, given)]
        if found and authorization.startswith("Bearer "):
            return found[0]
        raise AuthError(
            "the token is wrong" if authorization else "the call carries no bearer token",
            limit="a token of the service",
            remedy="give it as connect(token=...), an API key, OCTOPUS_TOKEN or OCTOPUS_TOKEN_FILE",
        )


def read_tokens(path: Path) -> list[tuple[str, Caller]]:
    """The tokens of a file: `NAME SCOPE TOKEN` in each line, `#` begins a comment.

    Raises:
        ConfigError: It cannot be read, or a line is none; no token is shown.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            "cannot read server.tokens", value=path, remedy=f"check the file: {error}"
        ) from error
    rows = [
        (number, line.split())
        for number, line in enumerate(text.splitlines(), 1)
        if line.strip() and not line.lstrip().startswith("#")
    ]
    if not rows:
        raise ConfigError("server.tokens names no token", value=path, limit="NAME SCOPE TOKEN")
    found = [_row(path, number, words) for number, words in rows]
    if len({token for token, _ in found}) < len(found):
        raise ConfigError("server.tokens names a token twice", value=path, remedy="draw another")
    return found


def _row(path: Path, number: int, words: list[str]) -> tuple[str, Caller]:
    wrong = ""
    if len(words) != 3:
        wrong = f"{len(words)} words"
    elif not _NAME.fullmatch(words[0]):
        wrong = "a name of other characters than A-Za-z0-9_.-, or above 64"
    elif words[1] not in tuple(Scope):
        wrong = "another scope"
    elif len(words[2]) < MIN_TOKEN_LENGTH:
        wrong = f"a token of {len(words[2])} characters"
    if wrong:
        raise ConfigError(
            "a line of server.tokens is none",
            value=f"{path}, line {number}: {wrong}",
            limit=f"NAME {'|'.join(Scope)} TOKEN, at least {MIN_TOKEN_LENGTH} characters",
        )
    name, scope, token = words
    return token, Caller(name=name, scope=Scope(scope))


def _digest(token: str) -> bytes:
    # Of one length for all, so that not even a token's length shows in the time.
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()
