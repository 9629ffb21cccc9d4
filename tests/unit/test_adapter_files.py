"""Adapter files from elsewhere: where they may lie, what they may be, how large."""

from __future__ import annotations

import hashlib
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import pytest
from safetensors.numpy import save_file

from harness_sdk import control
from harness_sdk.control import PolicyAnnouncement
from harness_sdk.errors import AdapterError
from rollout_service import adapter_files
from rollout_service.adapter_files import check_files, check_sha256, copy_adapter, shared_folder

PREFIX = "base_model.model.model.layers.0.self_attn.q_proj"
GOOD = {f"{PREFIX}.lora_A.weight": (4, 8), f"{PREFIX}.lora_B.weight": (8, 4)}
CONFIG: dict[str, Any] = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]}


def adapter(folder: Path, shapes: dict[str, tuple[int, ...]], dtype: str = "float32") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: np.zeros(shape, dtype) for name, shape in shapes.items()}
    save_file(tensors, folder / control.ADAPTER_FILE)
    (folder / control.ADAPTER_CONFIG_FILE).write_text(json.dumps(CONFIG))
    return folder


def check(folder: Path, **changed: Any) -> None:
    sha256 = hashlib.sha256((folder / control.ADAPTER_FILE).read_bytes()).hexdigest()
    announcement = PolicyAnnouncement(
        version=1, sha256=sha256, num_tensors=2, rank=4, alpha=8.0, uri="", base_model="b",
        probe_token_ids=(1, 2),
    )  # fmt: skip
    check_sha256(replace(announcement, **changed), folder)
    check_files(replace(announcement, **changed), folder)


def test_a_good_adapter_passes(tmp_path: Path) -> None:
    source, target = adapter(tmp_path / "source", GOOD), tmp_path / "target"
    target.mkdir()
    assert shared_folder(1, source.as_uri(), tmp_path) == source
    size = (source / control.ADAPTER_FILE).stat().st_size
    copy_adapter(1, source, target, size)
    copied, sent = ((folder / control.ADAPTER_FILE).read_bytes() for folder in (target, source))
    assert copied == sent
    check(target)
    with pytest.raises(AdapterError, match=f"too large.*{size - 1} bytes"):
        copy_adapter(1, source, target, size - 1)


def test_more_bytes_than_a_file_has_at_first_are_counted_too(tmp_path: Path) -> None:
    # A pipe has none at first, as a file that is still written.
    reader, writer = os.pipe()
    os.write(writer, b"12345")
    os.close(writer)
    with open(reader, "rb") as file:
        assert adapter_files._copy(file, tmp_path / "copy", 4) is False


def test_an_address_leads_to_the_runs_folder_alone(tmp_path: Path) -> None:
    run, outside = tmp_path / "run", adapter(tmp_path / "outside", GOOD)
    run.mkdir()
    (run / "link").symlink_to(outside)
    (run / "loop").symlink_to(run / "loop")
    for uri in (
        outside.as_uri(),
        f"file://{run}/../outside",
        f"file://{run}/..%2foutside",
        f"file://{quote(str(run / 'link'))}",
        f"file://{run}/link",
        f"file://host{run}/v1",
        f"file://{run}/loop/x",
        f"file://{run}/a%00b",
        "file:",
    ):
        with pytest.raises(AdapterError, match="outside of the run's folder"):
            shared_folder(1, uri, run)
    assert shared_folder(1, (run / "policy" / "1").as_uri(), run) == run / "policy" / "1"


def test_links_pipes_and_devices_are_no_adapters(tmp_path: Path) -> None:
    target, source = tmp_path / "target", adapter(tmp_path / "source", GOOD)
    target.mkdir()
    path = source / control.ADAPTER_FILE
    path.rename(tmp_path / "elsewhere")
    began = time.monotonic()
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(AdapterError, match="symbolic link"):
        copy_adapter(1, source, target, 1 << 20)
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(AdapterError, match="no regular file"):
        copy_adapter(1, source, target, 1 << 20)
    path.unlink()
    path.mkdir()
    with pytest.raises(AdapterError, match="adapter_model"):
        copy_adapter(1, source, target, 1 << 20)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("shapes", "dtype", "told"),
    [
        ({f"{PREFIX}.lora_A.weight": (4,), f"{PREFIX}.lora_B.weight": (8, 4)}, "float32",
         "no matrix"),
        ({f"{PREFIX}.lora_A.weight": (4, 8, 1), f"{PREFIX}.lora_B.weight": (8, 4)}, "float32",
         "no matrix"),
        (GOOD, "float64", "no matrix"),
        (GOOD, "int64", "no matrix"),
        ({"../../etc/passwd": (4, 8), f"{PREFIX}.lora_B.weight": (8, 4)}, "float32",
         "names a tensor"),
        ({"a\n2026-01-01 ERROR forged": (4, 8), "b": (8, 4)}, "float32", "names a tensor"),
        ({"/abs": (4, 8), "b": (8, 4)}, "float32", "names a tensor"),
        ({"a..b": (4, 8), "b": (8, 4)}, "float32", "names a tensor"),
        ({"a" * 257: (4, 8), "b": (8, 4)}, "float32", "names a tensor"),
        ({"a": (4, 8)}, "float32", "number of tensors"),
    ],
)  # fmt: skip
def test_tensors_of_other_names_shapes_and_types_are_refused(
    tmp_path: Path, shapes: dict[str, tuple[int, ...]], dtype: str, told: str
) -> None:
    folder = adapter(tmp_path / "a", shapes, dtype)
    with pytest.raises(AdapterError, match=told) as caught:
        check(folder)
    assert "\n" not in str(caught.value)


def test_a_pattern_that_never_ends_is_refused(tmp_path: Path) -> None:
    folder = adapter(tmp_path / "a", GOOD)
    path = folder / control.ADAPTER_CONFIG_FILE
    slow = r"(\w+)+x"
    for changed in (
        {"target_modules": slow},
        {"rank_pattern": {slow: 4}},
        {"alpha_pattern": {slow: 4}},
        {"target_modules": "a" * 257},
    ):
        path.write_text(json.dumps(CONFIG | changed))
        with pytest.raises(AdapterError, match="forever"):
            check(folder)
    for changed in ({"target_modules": r".*\.(q|v)_proj"}, {"rank_pattern": {"q_proj": 4}}):
        path.write_text(json.dumps(CONFIG | changed))
        check(folder)


@pytest.mark.parametrize("text", ["", "[]", "{", '{"r": 4}', "[" * 100_000])
def test_a_configuration_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    folder = adapter(tmp_path / "a", GOOD)
    (folder / control.ADAPTER_CONFIG_FILE).write_text(text)
    with pytest.raises(AdapterError, match="not PEFT's"):
        check(folder)
