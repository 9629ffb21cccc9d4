"""The audit's verdicts, with a stand-in for pip-audit that knows what a test tells it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.audit import LOCK, VULNERABLE

ROOT = Path(__file__).parents[2]
STAND_IN = """\
#!{python}
import json, os, sys
known = os.environ["KNOWN"].split()
assert "--strict" in sys.argv and sys.argv[sys.argv.index("--vulnerability-service") + 1] == "osv"
packages = [line.split("==") for line in open(sys.argv[sys.argv.index("--requirement") + 1])]
if known == ["nobody"]:
    sys.exit("api.osv.dev cannot be reached")
for name, version in packages:
    if f"unknown:{{name}}" in known:
        sys.exit(f"{{name}} not found")
found = [
    {{"name": name, "version": version.strip(), "vulns": [
        {{"id": "PYSEC-1", "aliases": ["CVE-1"], "fix_versions": ["9.1", "10"]}}
    ] if name in known else []}}
    for name, version in packages
]
print(json.dumps({{"dependencies": found, "fixes": []}}))
sys.exit(any(each["vulns"] for each in found))
"""


def _audit(folder: Path, known: str, *words: str) -> subprocess.CompletedProcess[str]:
    program = folder / "pip-audit"
    program.write_text(STAND_IN.format(python=sys.executable))
    program.chmod(0o755)
    (folder / "lock.txt").write_text("aiohttp==3.0.0\nredis==6.0.0\n")
    return subprocess.run(
        [sys.executable, str(ROOT / "tests" / "audit.py"), "--pip-audit", str(program),
         "--lock", str(folder / "lock.txt"), "--vulnerability-service", "osv", *words],
        capture_output=True, text=True, check=False, env={**os.environ, "KNOWN": known},
    )  # fmt: skip


def test_nothing_known_of_the_lock_passes(tmp_path: Path) -> None:
    done = _audit(tmp_path, "jinja2")
    assert (done.returncode, done.stdout) == (0, "no known vulnerability in lock.txt\n")


@pytest.mark.parametrize("words", [(), ("--if-answered",)])
def test_a_vulnerable_package_fails_with_its_names_and_remedy(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = _audit(tmp_path, "jinja2 redis", *words)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "redis 6.0.0: PYSEC-1, CVE-1; mended in 9.1, 10\n"


@pytest.mark.parametrize(
    ("known", "why"),
    [
        ("nobody", "api.osv.dev cannot be reached"),
        # As a mirror without vulnerabilities has it: of no release any is known.
        ("", f"it knows nothing of {VULNERABLE}"),
    ],
)
def test_a_service_that_tells_nothing_is_no_success(tmp_path: Path, known: str, why: str) -> None:
    alone, in_ci = _audit(tmp_path, known), _audit(tmp_path, known, "--if-answered")
    assert (alone.returncode, in_ci.returncode) == (1, 0)
    for done in (alone, in_ci):
        assert done.stdout == ""
        assert done.stderr.startswith("not audited: ")
        assert why in done.stderr and 'AUDIT="--vulnerability-service osv"' in done.stderr


def test_a_package_that_cannot_be_looked_up_fails_in_ci_too(tmp_path: Path) -> None:
    done = _audit(tmp_path, "jinja2 unknown:redis", "--if-answered")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "the audit is not complete: redis not found\n"


def test_every_line_of_the_lock_is_a_version_to_look_up() -> None:
    lines = LOCK.read_text("utf-8").splitlines()
    assert len(lines) > 100
    assert all(line.count("==") == 1 and not set(line) & set(" ;#+") for line in lines)
