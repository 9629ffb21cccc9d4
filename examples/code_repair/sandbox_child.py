"""Runs in the sandbox: confines itself, then evaluates expressions over the code it was sent.

Reads one JSON object from stdin and writes one JSON line for what could not be confined and one
for each expression. Standard library alone: `python -I -S` starts it.
"""

from __future__ import annotations

import ctypes
import json
import os
import resource
import struct
import sys
from typing import Any

NOBODY = 65_534
# Numbers of Landlock's system calls, the same on every architecture, and its access rights.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ = 1 << 2 | 1 << 3
_WRITE = 1 << 1 | sum(1 << bit for bit in range(4, 13))
_KEEP_CAPABILITIES, _NO_NEW_PRIVS = 8, 38
_CAPABILITIES_V3, _READ_ANYTHING = 0x20080522, 1 << 2


def main() -> None:
    """Evaluate what stdin asks for."""
    order = json.load(sys.stdin)
    results = os.dup(1)
    os.dup2(2, 1)
    _tell(results, {"unconfined": _confine(order["limits"])})
    namespace: dict[str, Any] = {"__name__": "solution"}
    failure = ""
    try:
        exec(compile(order["source"], "solution.py", "exec"), namespace)
    except BaseException as error:
        failure = _shown(error)
    for expression in order["expressions"]:
        _tell(results, {"error": failure} if failure else _evaluated(expression, namespace))


def _evaluated(expression: str, namespace: dict[str, Any]) -> dict[str, str]:
    try:
        return {"value": repr(eval(expression, namespace))}
    except BaseException as error:
        return {"error": _shown(error)}


def _shown(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:200]


def _tell(results: int, line: dict[str, Any]) -> None:
    os.write(results, json.dumps(line).encode() + b"\n")


def _confine(limits: dict[str, int]) -> str:
    """Give up what the code does not need; returns what could not be given up, and why."""
    unconfined = ""
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0:
        _become_nobody(libc)
    try:
        _close_files(libc, os.getcwd())
    except OSError as error:
        unconfined = f"files: {error}"
        _keep_capabilities(libc, 0)
    for name, value in limits.items():
        resource.setrlimit(getattr(resource, name), (value, value))
    return unconfined


def _become_nobody(libc: Any) -> None:
    """Another user, since limits on processes do not bind root.

    It may still read what root may, for Python itself may be root's; Landlock then says what.
    """
    os.chown(".", NOBODY, NOBODY)
    os.setgroups([])
    os.setgid(NOBODY)
    libc.prctl(_KEEP_CAPABILITIES, 1, 0, 0, 0)
    os.setuid(NOBODY)
    _keep_capabilities(libc, _READ_ANYTHING)


def _keep_capabilities(libc: Any, mask: int) -> None:
    libc.capset(struct.pack("Ii", _CAPABILITIES_V3, 0), struct.pack("6I", mask, mask, 0, 0, 0, 0))


def _close_files(libc: Any, folder: str) -> None:
    """Landlock: write in `folder` alone; read there and where Python itself is.

    Raises:
        OSError: The kernel has no Landlock.
    """

    def call(number: int, *arguments: Any) -> int:
        result = libc.syscall(number, *arguments)
        if result < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return result

    version = call(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    # Renaming across folders and truncating came with versions 2 and 3; TCP with 4; signals and
    # sockets without a path with 6.
    write = _WRITE | (1 << 13 if version >= 2 else 0) | (1 << 14 if version >= 3 else 0)
    handled = struct.pack("QQQ", _READ | write, 3, 3)[: 8 * (1 + (version >= 4) + (version >= 6))]
    rules = call(_CREATE_RULESET, handled, ctypes.c_size_t(len(handled)), 0)
    readable = {sys.base_prefix, "/usr", "/lib", "/lib64"}
    for path, access in ((folder, _READ | write), *((each, _READ) for each in sorted(readable))):
        if os.path.isdir(path):
            beneath = os.open(path, os.O_PATH)
            call(_ADD_RULE, rules, 1, struct.pack("=Qi", access, beneath), 0)
            os.close(beneath)
    if libc.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0):
        raise OSError(ctypes.get_errno(), "no_new_privs is refused")
    call(_RESTRICT_SELF, rules, 0)


if __name__ == "__main__":
    main()
