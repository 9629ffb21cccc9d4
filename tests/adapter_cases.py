"""A replica of adapters on the real engine, and adapters that PEFT wrote for it."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import AsyncGenerator, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file, save_file

from harness_sdk import control
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from rollout_service.adapters import Adapters
from rollout_service.engine.transformers import TransformersEngine
from tests.tiny_models import LORA_TARGETS

PROBE = (5, 6, 7, 8, 9, 10)
RANK, ALPHA = 4, 8.0


@dataclass(slots=True)
class Replica:
    """An engine with its adapters, and a source of announcements for it."""

    engine: TransformersEngine
    adapters: Adapters
    model: Path
    folder: Path
    pinned: set[int] = field(default_factory=set)

    def announce(self, version: int, folder: Path, *, uri: str = "") -> PolicyAnnouncement:
        """What a trainer would announce for `folder`."""
        data = (folder / control.ADAPTER_FILE).read_bytes()
        return PolicyAnnouncement(
            version=version,
            sha256=hashlib.sha256(data).hexdigest(),
            num_tensors=len(load_file(folder / control.ADAPTER_FILE)),
            rank=RANK,
            alpha=ALPHA,
            uri=uri or folder.as_uri(),
            base_model=self.engine.info.model_hash,
            probe_token_ids=PROBE,
        )

    def adapter(self, seed: int) -> Path:
        """A random adapter in PEFT's format, written by PEFT."""
        folder = self.folder / f"seed-{seed}"
        peft_model(self.model, seed).save_pretrained(str(folder))
        return folder

    def edited(self, name: str, edit: Any) -> Path:
        """A copy of a good adapter whose tensors `edit` changed."""
        source, folder = self.adapter(99), self.folder / name
        tensors = load_file(source / control.ADAPTER_FILE)
        edit(tensors)
        folder.mkdir()
        save_file(tensors, folder / control.ADAPTER_FILE)
        config = (source / control.ADAPTER_CONFIG_FILE).read_text()
        (folder / control.ADAPTER_CONFIG_FILE).write_text(config)
        return folder


def peft_model(model: Path, seed: int) -> peft.PeftModel:
    """`model` with random weights in all of its adapter."""
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    config = peft.LoraConfig(
        r=RANK, lora_alpha=int(ALPHA), target_modules=LORA_TARGETS["qwen3_5"], task_type="CAUSAL_LM"
    )
    torch.manual_seed(seed)
    adapted = peft.get_peft_model(base, config)
    for name, parameter in adapted.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.3)
    return adapted


def new_adapters(
    engine: TransformersEngine, folder: Path, *, pinned: Collection[int] = (), **options: Any
) -> Adapters:
    """Of a replica that holds two versions and has cached none."""
    state = ReplicaState(replica_id="r", alive=True, address="127.0.0.1:1", versions=(0,))
    return Adapters(
        engine, state, run="test", folder=folder, shared=folder.parent, pinned=lambda: pinned,
        **{"max_versions": 2, **options},
    )  # fmt: skip


@contextlib.asynccontextmanager
async def open_replica(model: Path, folder: Path) -> AsyncGenerator[Replica]:
    """Of `model`, on the transformers engine; closed again, it leaves nothing in its cache."""
    engine = TransformersEngine(str(model))
    await engine.start()
    pinned: set[int] = set()
    served = new_adapters(engine, folder / "cache", pinned=pinned, fetch=never)
    yield Replica(engine, served, model, folder, pinned)
    await served.close()
    await engine.close()
    assert not (folder / "cache").exists()


def reference_logprobs(model: Path, seed: int) -> list[float]:
    """PEFT's own of the probe, in nats."""
    with torch.no_grad():
        logits = peft_model(model, seed).eval()(torch.tensor([PROBE])).logits[0]
    logprobs = logits.log_softmax(-1)
    return [float(logprobs[i, token]) for i, token in enumerate(PROBE[1:])]


def drop_tensor(tensors: dict[str, torch.Tensor]) -> None:
    """Leave one tensor out."""
    del tensors["base_model.model.model.layers.0.mlp.up_proj.lora_A.weight"]


async def never(version: int, folder: Path) -> None:
    """For replicas that read adapters from folders alone."""
    raise AssertionError("no adapter travels through Redis here")
