"""Looks what images install up among known vulnerabilities: `python tests/audit.py --help`.

pip-audit asks a service. A mirror of PyPI, or a proxy, may answer it and tell of no vulnerability
at all: an old release that is known to be vulnerable is looked up first, so that silence is no
success. Needs nothing but pip-audit.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

LOCK = Path(__file__).parents[1] / "constraints.txt"
VULNERABLE = "jinja2==2.4.1"
"""Among others CVE-2014-1402; every service knows it."""


class Unanswered(Exception):
    """The service did not say what is known of a package."""


def main(words: list[str] | None = None) -> int:
    """Audit and tell; 1 where something is vulnerable, or where nobody could be asked."""
    args, options = _parser().parse_known_args(words)
    program = [args.pip_audit, *options]
    try:
        if not _vulnerabilities(program, VULNERABLE + "\n"):
            raise Unanswered(f"it knows nothing of {VULNERABLE}, which is vulnerable")
    except Unanswered as error:
        told = (
            f"not audited: the service tells no known vulnerabilities: {error}; run it where"
            " https://pypi.org can be reached itself and no mirror answers for it, or ask another"
            ' service: make audit AUDIT="--vulnerability-service osv" asks https://api.osv.dev'
        )
        print(told, file=sys.stderr)
        return 0 if args.if_answered else 1
    try:
        found = _vulnerabilities(program, args.lock.read_text("utf-8"))
    except Unanswered as error:
        print(f"the audit is not complete: {error}", file=sys.stderr)
        return 1
    for name, vulnerabilities in found.items():
        for each in vulnerabilities:
            names = ", ".join((each["id"], *each.get("aliases", ())))
            mended = ", ".join(each["fix_versions"]) or "no version"
            print(f"{name}: {names}; mended in {mended}", file=sys.stderr)
    if not found:
        print(f"no known vulnerability in {args.lock.name}")
    return 1 if found else 0


def _vulnerabilities(program: list[str], requirements: str) -> dict[str, list[dict[str, Any]]]:
    """Those of each vulnerable package, `name version`.

    Args:
        program: pip-audit and its options.
        requirements: A pinned version a line.

    Raises:
        Unanswered: With what pip-audit says of it.
    """
    with TemporaryDirectory() as folder:
        path = Path(folder) / "requirements.txt"
        path.write_text(requirements, "utf-8")
        # Strict: a package that the service does not know is no package without vulnerabilities.
        done = subprocess.run(
            [*program, "--strict", "--progress-spinner", "off", "--format", "json",
             "--no-deps", "--disable-pip", "--requirement", str(path)],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:
        last = (done.stderr.strip() or "it ended without a word").splitlines()[-1]
        raise Unanswered(last) from None
    return {
        f"{each['name']} {each['version']}": each["vulns"] for each in packages if each["vulns"]
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tests/audit.py", description=__doc__, epilog="Further options are pip-audit's."
    )
    parser.add_argument("--pip-audit", default="pip-audit", help="the program")
    parser.add_argument("--lock", type=Path, default=LOCK, help="pinned versions, one a line")
    parser.add_argument(
        "--if-answered",
        action="store_true",
        help="end with 0, and say so, where no service tells vulnerabilities",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
