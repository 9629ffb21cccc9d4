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
        ConfigError: The base model here is not the leader's.
        EngineError: The leader or another follower is gone.
    """
    policy = load_policy(config, None, ranks)
    optimizer = new_optimizer(policy, config)
    copy_leader(policy, optimizer, ranks)
    log.info("process %d of %d follows", ranks.rank, ranks.size)
    with loaded_is_kept():
        follow_steps(policy, optimizer, config, ranks)


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
