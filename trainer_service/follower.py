"""A trainer's other processes: they hold what the leader holds and compute shares of its steps."""

from __future__ import annotations

import logging
from typing import Any

import torch

from harness_sdk.errors import ConfigError
from trainer_service.config import TrainerConfig
from trainer_service.garbage import loaded_is_kept
from trainer_service.optim import Optimizer
from trainer_service.policy import Policy
from trainer_service.ranks import Ranks
from trainer_service.run_state import load_policy, new_optimizer
from trainer_service.step import follow_steps

log = logging.getLogger(__name__)


def follow(config: TrainerConfig, ranks: Ranks) -> None:
    """Take part in the leader's steps until it ends; blocking.

    Raises:
        ConfigError: The settings or the base model here are not the leader's.
        EngineError: The leader or another follower is gone.
    """
    agree(config, ranks)
    policy = load_policy(config, None, ranks)
    optimizer = new_optimizer(policy, config)
    copy_leader(policy, optimizer, ranks)
    log.info("process %d of %d follows", ranks.rank, ranks.size)
    with loaded_is_kept():
        follow_steps(policy, optimizer, config, ranks)


def agree(config: TrainerConfig, ranks: Ranks) -> None:
    """Refuse settings other than the leader's; all ranks call it, before they load.

    With another dtype a rank would wait where the others do not, and with another loss its
    gradients would be added to theirs without a word.

    Raises:
        ConfigError: At a follower that has others, and at the leader; with what differs.
    """
    own = _settings(config)
    leader: dict[str, Any] = ranks.broadcast(own)
    wrong = {name: value for name, value in own.items() if leader.get(name) != value}
    gathered = dict(enumerate(ranks.gather(wrong))) or {ranks.rank: wrong}
    for rank, theirs in gathered.items():
        if theirs:
            raise ConfigError(
                f"process {rank} of the trainer has other settings than the one that leads",
                value=", ".join(f"{name} {value}" for name, value in theirs.items()),
                limit=", ".join(f"{name} {leader.get(name)}" for name in theirs),
                remedy="give all processes the same ones",
            )


def copy_leader(policy: Policy, optimizer: Optimizer, ranks: Ranks) -> None:
    """Make every rank's adapter and optimiser the leader's, bit for bit; all ranks call it.

    The leader alone reads the checkpoint: others need no access to its folder.

    Raises:
        ConfigError: At a follower whose base model is another one.
    """
    if ranks.size == 1:
        return
    model_hash: str = ranks.broadcast(policy.model_hash)
    if model_hash != policy.model_hash:
        raise ConfigError(
            "the processes of the trainer have different base models",
            value=policy.model_hash,
            limit=model_hash,
            remedy="give all of them the same model.path",
        )
    parameters = policy.trainable_parameters()
    held: list[torch.Tensor] = ranks.broadcast([p.detach().cpu() for p in parameters])
    state: dict[str, Any] = ranks.broadcast(optimizer.state_dict())
    if ranks.leads:
        return
    with torch.no_grad():
        for parameter, value in zip(parameters, held, strict=True):
            parameter.copy_(value)
    optimizer.load_state_dict(state)


def _settings(config: TrainerConfig) -> dict[str, Any]:
    """What a follower computes with, by dotted key; folders and devices are each one's own."""
    sections = {
        "model": config.model.model_dump(mode="json", exclude={"path", "device"}),
        "lora": config.lora.model_dump(mode="json", exclude={"adapter"}),
        "batch": config.batch.model_dump(include={"max_strip_tokens", "max_piece_tokens"}),
        "loss": config.loss.model_dump(),
        "optim": config.optim_options.model_dump(),
        "ranks": config.ranks.model_dump(),
    }
    dotted = {
        f"{name}.{key}": value for name, own in sections.items() for key, value in own.items()
    }
    return {"objective": config.objective, **dotted}
