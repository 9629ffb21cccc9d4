"""What our commands make of the containers that Kubernetes' manifests describe."""

from __future__ import annotations

import argparse
import importlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness_sdk.cli.run_config import RunConfig
from harness_sdk.cli.settings import load_config, parse_arguments
from rollout_service.config import RolloutConfig
from trainer_service.config import TrainerConfig

_CONFIGS: dict[str, Any] = {"rollout": RolloutConfig, "trainer": TrainerConfig, "run": RunConfig}


def container_config(
    name: str,
    container: Any,
    environment: Mapping[str, str],
    files: Mapping[str, str],
    folder: Path,
) -> Any:
    """The settings of the command `name`.

    Args:
        name: `rollout`, `trainer` or `run`.
        container: Of the pod.
        environment: What the container sees.
        files: What it finds in /config, by name.
        folder: Where these are written.
    """
    for file, text in files.items():
        (folder / file).write_text(text)
    words = [
        re.sub(r"\$\((\w+)\)", lambda match: environment[match[1]], word).replace(
            "/config/", f"{folder}/"
        )
        for word in container["command"]
    ]
    begin = words.index("trainer_service") + 1 if name == "trainer" else 2
    parser = argparse.ArgumentParser()
    importlib.import_module(f"harness_sdk.cli.{name}").add_arguments(parser)
    args = parse_arguments(parser, words[begin:])
    return load_config(_CONFIGS[name], args.config, args.overrides, environment)
