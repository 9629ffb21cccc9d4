"""Model folders shared by the service tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.chat_tokenizers import VOCAB_SIZE, save_chat_tokenizer
from tests.engine_cases import sharp_model
from tests.tiny_models import save_tiny_model


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


@pytest.fixture(scope="session")
def chat_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny hybrid model with a ChatML tokenizer."""
    folder = save_tiny_model(tmp_path_factory.mktemp("chat"), "qwen3_5", vocab_size=VOCAB_SIZE)
    return save_chat_tokenizer(folder)
