"""What `octopus up` starts of each service: names, settings, GPUs and programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_sdk.cli.settings import validate_config
from harness_sdk.errors import ConfigError
from harness_sdk.json_values import is_object, within

if TYPE_CHECKING:
    from harness_sdk.cli.stack_config import StackConfig
    from rollout_service.config import RolloutConfig
    from trainer_service.config import TrainerConfig

_PORTS = (("server", "port"), ("openai", "port"), ("metrics", "port"))


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicePlan:
    """One service as it is started."""

    name: str
    """Of its log and its settings' file."""
    module: str
    """`rollout_service` or `trainer_service`."""
    settings: dict[str, Any]
    num_processes: int = 1
    """Above 1, torchrun starts them."""
    stop_s: float = 30.0
    """What they have to stop before torchrun kills them."""
    gpus: tuple[str, ...] | None = None
    """What it sees of them; None lets it see all."""

    def argv(self, settings_file: Path) -> list[str]:
        """Program and arguments."""
        command = ["-m", self.module, "--config", str(settings_file)]
        if self.num_processes > 1:
            count = str(self.num_processes)
            torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", count]
            # In whole seconds, and before torchrun itself is killed.
            timeout = str(max(int(self.stop_s) - 2, 1))
            command = [*torchrun, "--shutdown-timeout", timeout, *command]
        return [sys.executable, *command]

    def environment(self) -> dict[str, str]:
        """Which GPUs it sees."""
        return {} if self.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(self.gpus)}


def replica_plans(config: StackConfig) -> list[ServicePlan]:
    """The rollout services; settings of `config.rollout` win.

    Raises:
        ConfigError: The service would refuse them, or several replicas cannot share one.
    """
    if not config.with_rollout:
        return []
    return [_replica_plan(config, number) for number in range(config.replicas)]


def trainer_plan(config: StackConfig, over: Mapping[str, Any] | None = None) -> ServicePlan:
    """The trainer; settings of `config.trainer` win, those of `over` most.

    Raises:
        ConfigError: The service would refuse them, or so many processes cannot run them.
    """
    from trainer_service.config import TrainerConfig

    settings = _merged(
        {
            "run": config.run,
            "run_folder": str(config.folder),
            "model": {"path": str(config.model)},
        },
        _merged(config.trainer, over or {}),
    )
    trainer = validate_config(TrainerConfig, settings)
    count = config.trainer_processes
    if count == 1 and trainer.ranks.sharding != "none":
        raise ConfigError(
            f"trainer.ranks.sharding {trainer.ranks.sharding} does not go with trainer_processes 1",
            remedy="raise trainer_processes, or set trainer.ranks.sharding none",
        )
    if count > 1 and ":" in trainer.model.device:
        raise ConfigError(
            f"trainer.model.device {trainer.model.device} does not go with "
            f"trainer_processes {count}",
            remedy="set trainer.model.device cuda: each process takes a device of its own",
        )
    replicas = replica_plans(config)
    each = 0
    if replicas:
        rollout = rollout_config(replicas[0])
        _check_types(rollout, trainer)
        _check_mount_layers(rollout, trainer)
        _check_versions(rollout, trainer)
        each = rollout.engine.vllm.tensor_parallel_size
    return ServicePlan(
        name="trainer",
        module="trainer_service",
        settings=settings,
        num_processes=count,
        stop_s=config.stop_s,
        gpus=_gpus(config, each, len(replicas) * each, count),
    )


def rollout_config(plan: ServicePlan) -> RolloutConfig:
    """A replica's settings as the service reads them.

    Raises:
        ConfigError: It would refuse them.
    """
    from rollout_service.config import RolloutConfig

    return validate_config(RolloutConfig, plan.settings)


def _replica_plan(config: StackConfig, number: int) -> ServicePlan:
    several = config.replicas > 1
    plan = ServicePlan(
        name=f"rollout-{number}" if several else "rollout",
        module="rollout_service",
        settings=_merged(
            {
                "run": config.run,
                "run_folder": str(config.folder),
                "replica_id": f"replica-{number}",
                "model": {"path": str(config.model)},
                "server": {"host": "127.0.0.1", "port": config.port and config.port + number},
                "openai": {"port": config.openai_port and config.openai_port + number},
            },
            config.rollout,
        ),
    )
    each = rollout_config(plan).engine.vllm.tensor_parallel_size
    if several:
        _check_shared(config)
    return replace(plan, gpus=_gpus(config, each, number * each, each))


def _check_types(rollout: RolloutConfig, trainer: TrainerConfig) -> None:
    """Refuse what the trainer would refuse at the first episode, or at its first version."""
    from trainer_service.number_types import NARROW, NumberTypes, unequal_types

    own, sampled = NumberTypes.of(trainer.model), NumberTypes.of(rollout.model)
    for unequal in unequal_types(trainer, own, sampled):
        key = unequal.setting.removeprefix("model.")
        theirs, ours = getattr(rollout.model, key), getattr(trainer.model, key)
        raise ConfigError(
            f"rollout.{unequal.setting} {theirs} does not go with trainer.{unequal.setting} {ours}",
            remedy="set the same one for both: log-probabilities of both sides are compared",
        )
    is_rougher = rollout.model.dtype in NARROW and trainer.model.dtype not in NARROW
    if is_rougher and trainer.publishes and trainer.publish.probe_tolerance is None:
        raise ConfigError(
            f"rollout.model.dtype {rollout.model.dtype} does not pass a published version's probe"
            f" of trainer.model.dtype {trainer.model.dtype}",
            limit=f"{trainer.probe_tolerance:g} nats",
            remedy="set the same one for both, or trainer.publish.probe_tolerance, as 0.1",
        )


def _check_mount_layers(rollout: RolloutConfig, trainer: TrainerConfig) -> None:
    """Refuse what the trainer would refuse at its first strip that mounts."""
    sampled, own = rollout.model.mount_layers, trainer.model.mount_layers
    if sampled is None or own is None or sorted(set(sampled)) == list(own):
        return
    raise ConfigError(
        "rollout.model.mount_layers does not go with trainer.model.mount_layers",
        value=f"{list(sampled)} and {list(own)}",
        remedy="set the same ones for both, in rising order, or leave both unset",
    )


def _check_versions(rollout: RolloutConfig, trainer: TrainerConfig) -> None:
    """Refuse slots that episodes within the policy lag alone would fill, and training wait for."""
    slots, needed = rollout.adapters.max_versions, trainer.max_policy_lag + 1
    if trainer.publishes and slots < needed:
        raise ConfigError(
            f"rollout.adapters.max_versions {slots} does not go with"
            f" trainer.batch.max_policy_lag {trainer.max_policy_lag}",
            limit=f"{needed} and more: an episode keeps the version that it began with",
            remedy="raise the first or lower the second",
        )


def _check_shared(config: StackConfig) -> None:
    """Refuse what only one replica of a machine can have."""
    if "replica_id" in config.rollout:
        raise ConfigError(
            f"rollout.replica_id does not go with replicas {config.replicas}",
            value=config.rollout["replica_id"],
            remedy="remove it: replicas are called replica-0 and so on",
        )
    for section, key in _PORTS:
        port = within(config.rollout, section).get(key)
        if str(port) not in ("None", "0"):
            raise ConfigError(
                f"rollout.{section}.{key} does not go with replicas {config.replicas}",
                value=port,
                limit="0, which takes a free one",
                remedy="set port or openai_port: each replica takes the next one",
            )


def _gpus(config: StackConfig, each: int, begin: int, count: int) -> tuple[str, ...] | None:
    """`count` of the GPUs that are divided, from the `begin`-th on; a replica takes `each`."""
    if config.gpus is None:
        return None
    replicas = config.replicas if config.with_rollout else 0
    processes = config.trainer_processes if config.with_trainer else 0
    needed = replicas * each + processes
    if needed > config.gpus:
        raise ConfigError(
            "replicas and trainer_processes take more than gpus",
            value=f"{needed}: {replicas} replicas of {each}, {processes} trainer processes",
            limit=config.gpus,
            remedy="lower replicas, trainer_processes or"
            " rollout.engine.vllm.tensor_parallel_size, or raise gpus",
        )
    return tuple(_visible(config.gpus)[begin : begin + count])


def _visible(count: int) -> Sequence[str]:
    """The names of `count` GPUs of this machine, as whoever started us let us see them."""
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return [str(index) for index in range(count)]
    names = [name.strip() for name in given.split(",") if name.strip()]
    if len(names) < count:
        raise ConfigError(
            "gpus is more than CUDA_VISIBLE_DEVICES lets this process see",
            value=count,
            limit=f"{len(names)}: {given}",
            remedy="lower gpus or widen CUDA_VISIBLE_DEVICES",
        )
    return names[:count]


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        below = merged.get(key)
        if is_object(value) and is_object(below):
            value = _merged(below, value)
        merged[key] = value
    return merged
