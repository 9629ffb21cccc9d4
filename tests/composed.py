"""compose.yaml as Docker Compose resolves it, for tests that have no engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]


def composed(variables: Mapping[str, str]) -> dict[str, Any]:
    """The file with its variables filled in.

    Args:
        variables: What the environment holds; each that has no default must be here.
    """

    def value(match: re.Match[str]) -> str:
        name, operator, rest = match.groups()
        # KeyError: a variable without a default that nobody was told to set.
        return variables[name] if operator == ":?" else variables.get(name, rest)

    text = (ROOT / "compose.yaml").read_text("utf-8")
    filled = re.sub(r"(?<!\$)\$\{(\w+)(:[-?])?([^}]*)\}", value, text)
    return yaml.safe_load(filled.replace("$$", "$"))
