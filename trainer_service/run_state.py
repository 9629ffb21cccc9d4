"""What a step changes and a restart brings back: policy, optimiser, versions, checkpoints."""

from __future__ import annotations

import logging
import random
import shutil
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from harness_sdk.errors import ConfigError
from harness_sdk.record import EpisodeRecord
from trainer_service.checkpoint import Checkpoint, CheckpointStore, copy_durably
from trainer_service.config import TrainerConfig
from trainer_service.optim import Optimizer
from trainer_service.policy import LoraOptions, Policy
from trainer_service.probe import probe_logprobs
from trainer_service.publish import Served
from trainer_service.ranks import Ranks

log = logging.getLogger(__name__)

_FIRST_PROBE = (0, 1, 2, 3)
"""Before any episode; every vocabulary has these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a run is; part of every checkpoint."""

    version: int = 0
    """Policy version that the adapter is; 0 is the base model."""
    checkpoint: int = 0
    """Number of the newest checkpoint: steps, skipped ones included."""
    num_groups: int = 0
    """Groups that group objectives have consumed."""
    probe_token_ids: tuple[int, ...] = ()
    """Of the newest version's announcement."""


class RunState:
    """Policy, optimiser and checkpoints: what a step changes and a restart brings back."""

    def __init__(
        self,
        config: TrainerConfig,
        policy: Policy,
        store: CheckpointStore,
        found: Checkpoint | None,
    ) -> None:
        self.config = config
        self.policy = policy
        self.optimizer = new_optimizer(policy, config)
        self.store = store
        self.progress = Progress()
        self._kept_version = 0
        self.feed_state: dict[str, Any] = {}
        if found is not None:
            self._resume(found)

    @classmethod
    def load(cls, config: TrainerConfig, ranks: Ranks | None = None) -> RunState:
        """Load model and newest checkpoint; blocking. Random numbers begin at the run's seed.

        Args:
            config: Of the service.
            ranks: Processes that this one leads; None leads none.
        """
        random.seed(config.seed)
        torch.manual_seed(config.seed)
        store = CheckpointStore(config.folder / "checkpoints", keep=config.checkpoint.keep)
        found = store.newest()
        adapter = found.adapter if found is not None else config.lora.adapter
        run = cls(config, load_policy(config, adapter, ranks), store, found)
        if found is None and config.lora.adapter is not None:
            # A given adapter is no base model: it is served as version 1.
            run.progress = Progress(version=1, probe_token_ids=_FIRST_PROBE)
            run.save({})
        return run

    def save(self, feed_state: Mapping[str, Any]) -> None:
        """Write the next checkpoint durably, then the adapter where its version is new."""
        self.progress = replace(self.progress, checkpoint=self.progress.checkpoint + 1)
        saved = self.store.save(
            self.progress.checkpoint,
            save_adapter=self.policy.save_adapter,
            state={
                "progress": asdict(self.progress),
                "feed": dict(feed_state),
                "model_hash": self.policy.model_hash,
                "objective": self.config.objective,
            },
            optimizer=self.optimizer.state_dict(),
        )
        if self.progress.version > self._kept_version:
            self._keep_adapter(saved.adapter)

    def served(self, ranks: Ranks | None = None) -> Served:
        """What replicas must serve as the current version; runs the probe, `ranks` with it."""
        probe = self.progress.probe_token_ids
        return Served(
            version=self.progress.version,
            folder=self._adapters / str(self.progress.version),
            base_model=self.policy.model_hash,
            checksums=self.policy.checksums(),
            probe_token_ids=probe,
            probe_logprobs=probe_logprobs(self.policy, probe, ranks or Ranks()),
        )

    @property
    def _adapters(self) -> Path:
        return self.config.folder / "adapters"

    def _keep_adapter(self, source: Path) -> None:
        """Copy a checkpoint's adapter to `adapters/VERSION` and forget the oldest ones."""
        version = self.progress.version
        copy_durably(source, self._adapters / str(version))
        self._kept_version = version
        versions = sorted(
            int(path.name) for path in self._adapters.iterdir() if path.name.isdigit()
        )
        for old in versions[: -self.config.publish.keep_versions]:
            shutil.rmtree(self._adapters / str(old))

    def _resume(self, found: Checkpoint) -> None:
        state = found.state
        if state["model_hash"] != self.policy.model_hash:
            raise ConfigError(
                "the run's checkpoint belongs to another base model",
                value=self.policy.model_hash,
                limit=state["model_hash"],
                remedy="give the model that the run began with, or use a new run name",
            )
        progress = dict(state["progress"])
        progress["probe_token_ids"] = tuple(progress["probe_token_ids"])
        self.progress = Progress(**progress)
        self.feed_state = dict(state["feed"])
        same_loss = state["objective"] == self.config.objective
        self.optimizer.load_state_dict(found.tensors(), moments=same_loss)
        # The last process may have ended between the checkpoint and the copy.
        if self.progress.version > 0:
            self._keep_adapter(found.adapter)
        log.info(
            "resumed from checkpoint %d: version %d, %d steps, objective %s after %s%s",
            self.progress.checkpoint,
            self.progress.version,
            self.optimizer.num_steps,
            self.config.objective,
            state["objective"],
            "" if same_loss else ": the optimiser's moments start anew",
        )


def load_policy(config: TrainerConfig, adapter: Path | None, ranks: Ranks | None = None) -> Policy:
    """The base model with a new adapter, or the one in the folder `adapter`.

    Raises:
        ConfigError: `ranks.sharding` asks for more processes than `ranks` has.
    """
    mesh = (ranks or Ranks()).mesh(config.ranks.sharding)
    assert config.model.path is not None
    return Policy.load(
        config.model.path,
        lora=LoraOptions(
            rank=config.lora.rank,
            alpha=config.lora.alpha,
            target_modules=config.lora.targets or (),
            seed=config.seed,
        ),
        dtype=config.model.dtype,
        device=config.model.device,
        adapter_path=adapter,
        mount_layers=config.model.mount_layers,
        head_dtype=config.model.head_dtype,
        activation_checkpointing=config.model.activation_checkpointing,
        activation_tile_tokens=config.model.activation_tile_tokens,
        mesh=mesh,
    )


def new_optimizer(policy: Policy, config: TrainerConfig) -> Optimizer:
    """Of the adapter of `policy`, without moments."""
    return Optimizer(
        policy.trainable_parameters(),
        config.optim_options,
        scales_loss=policy.dtype == "float16",
    )


def probe_tokens(record: EpisodeRecord, count: int) -> tuple[int, ...]:
    """The first `count` tokens of the record's first path; at least two."""
    token_ids: list[int] = []
    last = -1
    for node in record.nodes:
        if node.parent == last and len(token_ids) < count:
            token_ids += node.token_ids
            last = node.node_id
    while len(token_ids) < 2:
        token_ids.append(token_ids[-1] if token_ids else 0)
    return tuple(token_ids[:count])
