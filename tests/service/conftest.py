"""Model folders shared by the engine tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.engine_cases import sharp_model


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Folder of a family's tiny model, written once."""
    folders: dict[str, Path] = {}

    def find(family: str) -> Path:
        if family not in folders:
            folders[family] = tmp_path_factory.mktemp(family) / family
            sharp_model(family).save_pretrained(str(folders[family]))
        return folders[family]

    return find
