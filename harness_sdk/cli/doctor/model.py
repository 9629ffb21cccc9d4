"""A checkpoint's folder and an adapter for it: served, trained, fitting each other."""

from __future__ import annotations

import json
import os
import re
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

from harness_sdk.cli.doctor.check import Check, failed
from harness_sdk.control import ADAPTER_CONFIG_FILE, ADAPTER_FILE
from harness_sdk.errors import ConfigError

_MAX_HEADER_BYTES = 100 << 20
_LORA_A = ".lora_A.weight"

Shapes = Mapping[str, tuple[int, ...]]


def check_model(folder: Path) -> Iterator[Check]:
    """Configuration, weights, and a chat template that the tokenizer can append to."""
    if not os.access(folder / "config.json", os.R_OK):
        yield Check(
            name="model", level="fail", text=f"no config.json that can be read in {folder}",
            remedy="give a Hugging Face checkpoint's folder",
        )  # fmt: skip
        return
    import transformers

    from rollout_service.chat import ChatRenderer, ChatTokenizer, load_template

    try:
        auto: Any = transformers.AutoConfig
        config = auto.from_pretrained(folder, local_files_only=True)
        yield Check(name="model", level="ok", text=f"{config.model_type} in {folder}")
        yield _training(config.get_text_config())
    except (OSError, ValueError) as error:
        yield Check(
            name="model", level="fail", text=str(error).splitlines()[0],
            remedy="give a checkpoint that this transformers release knows",
        )  # fmt: skip
    weights = sorted(folder.glob("*.safetensors"))
    if not weights:
        yield Check(
            name="weights", level="fail", text=f"no safetensors in {folder}",
            remedy="save the model with safetensors",
        )  # fmt: skip
    # safetensors says of it that there is no such file.
    for path in weights:
        if not os.access(path, os.R_OK):
            yield Check(
                name="weights", level="fail", text=f"{path} cannot be read by this user",
                remedy="let this user read it; where it is a link, give a copy",
            )  # fmt: skip
    try:
        tokenizer = ChatTokenizer.load(folder)
        yield Check(name="tokenizer", level="ok", text=f"{tokenizer.vocab_size} ids")
    except ConfigError as error:
        yield failed("tokenizer", error)
        return
    try:
        shape = ChatRenderer(tokenizer, load_template(folder)).probed.shape
        yield Check(name="template", level="ok", text=f"append-only, mode {shape.mode}")
    except ConfigError as error:
        yield failed("template", error)


def _training(config: Any) -> Check:
    """Whether the trainer knows how this architecture computes a packed tree."""
    from trainer_service.models import model_hooks

    try:
        targets = ", ".join(model_hooks(config).lora_targets)
    except ConfigError as error:
        return Check(name="training", level="warn", text=str(error), remedy=error.remedy)
    return Check(name="training", level="ok", text=f"LoRA on {targets}")


def check_adapter(folder: Path, model: Path | None) -> Iterator[Check]:
    """Whether an adapter is PEFT's, and each of its targets is a layer of the model."""
    try:
        config = _object((folder / ADAPTER_CONFIG_FILE).read_bytes())
        adapter = tensor_shapes(folder / ADAPTER_FILE)
        rank = int(config["r"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Check(
            name="adapter", level="fail", text=f"{folder} holds none of PEFT's: {error}",
            remedy=f"give a folder with {ADAPTER_CONFIG_FILE} and {ADAPTER_FILE}",
        )  # fmt: skip
        return
    yield Check(name="adapter", level="ok", text=f"rank {rank}, {len(adapter)} tensors")
    if model is None:
        yield Check(
            name="adapter targets", level="warn", text="not checked", remedy="give --model too"
        )
        return
    try:
        weights: dict[str, tuple[int, ...]] = {}
        for path in sorted(model.glob("*.safetensors")):
            weights |= tensor_shapes(path)
    except (OSError, ValueError) as error:
        yield Check(
            name="adapter targets", level="fail", text=str(error),
            remedy="save the model with safetensors again",
        )  # fmt: skip
        return
    yield _targets(adapter, weights)


def _targets(adapter: Shapes, weights: Shapes) -> Check:
    layers = {_in_layer(name.removesuffix(".weight")): shape for name, shape in weights.items()}
    known = {name.rpartition(".")[2] for name in layers}
    pairs = {
        _in_layer(name.removesuffix(_LORA_A)): shape
        for name, shape in adapter.items()
        if name.endswith(_LORA_A)
    }
    targets = sorted({name.rpartition(".")[2] for name in pairs})
    missing = [name for name in targets if name not in known]
    # Layers that the checkpoint stores under another name than the model gives them are passed.
    wrong = [
        f"{name} takes {shape[1]}, not {layers[name][1]}"
        for name, shape in pairs.items()
        if name in layers and layers[name][1:] != shape[1:]
    ]
    if not targets or missing or wrong:
        fault = f"not in the model: {', '.join(missing)}" if missing else "; ".join(wrong[:3])
        return Check(
            name="adapter targets", level="fail", text=fault or "the adapter has none",
            remedy="train it on this base model, or name its layers in lora.targets",
        )  # fmt: skip
    return Check(name="adapter targets", level="ok", text=", ".join(targets))


def tensor_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a safetensors file's tensors, from its header alone.

    Raises:
        OSError: It cannot be read.
        ValueError: It is no safetensors file.
    """
    with path.open("rb") as file:
        head = file.read(8)
        size = struct.unpack("<Q", head)[0] if len(head) == 8 else 0
        if not 0 < size <= _MAX_HEADER_BYTES:
            raise ValueError(f"{path} is no safetensors file")
        header = _object(file.read(size))
    return {
        name: tuple(tensor["shape"]) for name, tensor in header.items() if name != "__metadata__"
    }


def _object(data: bytes) -> dict[str, Any]:
    value: object = json.loads(data)
    if not isinstance(value, dict):
        raise ValueError("no JSON object")
    return cast("dict[str, Any]", value)


def _in_layer(name: str) -> str:
    """A module's name from its layer on: what stands before differs between wrappers."""
    found = re.search(r"layers\.\d+\..*", name)
    return found.group() if found else name
