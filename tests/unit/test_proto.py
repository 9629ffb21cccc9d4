"""The committed stubs are those of `proto/`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROTOS = sorted((ROOT / "proto").rglob("*.proto"))


def test_stubs_do_not_drift_from_proto(tmp_path: Path) -> None:
    flags = ["-Iproto", *(f"--{kind}_out={tmp_path}" for kind in ("python", "grpc_python", "pyi"))]
    names = [str(path.relative_to(ROOT)) for path in PROTOS]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", *flags, *names], cwd=ROOT, check=True
    )
    generated = {path.relative_to(tmp_path): path for path in tmp_path.rglob("*.py*")}
    assert len(generated) == 3 * len(PROTOS)
    for name, path in generated.items():
        assert path.read_text() == (ROOT / name).read_text(), f"run `make proto`: {name} drifted"
