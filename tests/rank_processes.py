"""Ranks of a trainer as processes of the test, without torchrun: steps, gradients, ends."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from harness_sdk.errors import HarnessError
from harness_sdk.record import EpisodeRecord
from trainer_service.config import TrainerConfig

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["trainer_service.loop", "trainer_service.follower"])


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepped:
    """What one rank has after a step."""

    loss: float
    gradients: Mapping[str, torch.Tensor]
    """Before clipping, by name."""
    adapter: Mapping[str, torch.Tensor]
    finite: tuple[bool, ...]
    """Whether this rank's own gradients were, in each try, before others' were added."""
    loss_scale: float
    """After the step; 1.0 where nothing passes through float16."""
    num_skipped: int
    """Steps that changed nothing."""
    probe: tuple[float, ...]
    """Log-probabilities under the new adapter; at the leader alone."""
    num_weights: int
    """Numbers of the base model that this rank holds between passes."""
    most_weights: int
    """The most of them that it held when a layer began its forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How a rank ended."""

    exit_code: int
    stepped: Stepped | None
    error: str


def step_once(
    config: TrainerConfig,
    records: list[EpisodeRecord],
    num_ranks: int,
    folder: Path,
    *,
    dies: int = -1,
) -> list[Ended]:
    """One step of each rank over `records`, groups as they say; all have ended when it returns.

    Args:
        config: Of the service.
        records: Of the step.
        num_ranks: Processes.
        folder: For what they leave.
        dies: Rank that kills itself in its first pass; -1 lets all live.
    """
    folder.mkdir(parents=True, exist_ok=True)
    # As torchrun's agent does, this process keeps the store: it outlives any rank.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    processes = [
        _CONTEXT.Process(
            target=_main,
            args=(rank, num_ranks, store.port, config, records, folder, rank == dies),
            daemon=True,
        )
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(90)
        return [_ended(process, folder / str(rank)) for rank, process in enumerate(processes)]
    finally:
        for process in processes:
            process.kill()
            process.join()


def _ended(process: Any, folder: Path) -> Ended:
    assert process.exitcode is not None, "a rank did not end"
    stepped, error = folder.with_suffix(".pt"), folder.with_suffix(".error")
    return Ended(
        exit_code=process.exitcode,
        stepped=torch.load(stepped, weights_only=False) if stepped.exists() else None,
        error=error.read_text() if error.exists() else "",
    )


def _main(
    rank: int,
    num_ranks: int,
    port: int,
    config: TrainerConfig,
    records: list[EpisodeRecord],
    folder: Path,
    dies: bool,
) -> None:
    from trainer_service import follower
    from trainer_service.ranks import Ranks
    from trainer_service.run_state import RunState, load_policy

    torch.set_num_threads(1)
    if num_ranks > 1:
        os.environ.update(
            RANK=str(rank), WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(port), TORCHELASTIC_USE_AGENT_STORE="True",
        )  # fmt: skip
    if dies:
        _die_in_the_first_pass()
    try:
        ranks = Ranks.join("cpu")
        kept: dict[str, Any] = {}
        if ranks.leads:
            state = RunState.load(config, ranks)
            _randomise(state.policy)
            policy, optimizer = state.policy, state.optimizer
            follower.copy_leader(policy, optimizer, ranks)
            _keep_finite(ranks, kept)
            kept |= _lead(state, config, records, ranks)
        else:
            policy = load_policy(config, None, ranks)
            optimizer = follower.new_optimizer(policy, config)
            follower.copy_leader(policy, optimizer, ranks)
            _keep_finite(ranks, kept)
            _keep_gradients(policy, optimizer, kept)
            _keep_most_weights(policy, kept)
            follower.follow_steps(policy, optimizer, config, ranks)
        adapter = {name: value.detach() for name, value in policy.adapter_tensors().items()}
        kept = {"loss": 0.0, "probe": (), **kept}
        stepped = Stepped(
            **kept,
            adapter=adapter,
            loss_scale=optimizer.loss_scale,
            num_skipped=optimizer.num_skipped,
            num_weights=_num_weights(policy),
        )
        torch.save(stepped, folder / f"{rank}.pt")
        ranks.leave()
    except HarnessError as error:
        (folder / f"{rank}.error").write_text(str(error))
        os._exit(1)


def _lead(
    state: Any, config: TrainerConfig, records: list[EpisodeRecord], ranks: Any
) -> dict[str, Any]:
    from trainer_service.feed import Batch
    from trainer_service.groups import Group, Scored
    from trainer_service.probe import probe_logprobs
    from trainer_service.step import dismiss, train_step

    groups: dict[str, list[Scored]] = {}
    for record in records:
        groups.setdefault(record.group_id, []).append(Scored.of(record.episode_id, record))
    batch = Batch(groups=tuple(Group(group_id=g, episodes=tuple(e)) for g, e in groups.items()))
    kept: dict[str, Any] = {}
    _keep_gradients(state.policy, state.optimizer, kept)
    _keep_most_weights(state.policy, kept)
    result = train_step(state.policy, state.optimizer, batch, config, version=0, ranks=ranks)
    probe = probe_logprobs(state.policy, (1, 2, 3, 4), ranks)
    dismiss(ranks)
    return {**kept, "loss": result.metrics["loss/total"], "probe": probe}


def _randomise(policy: Any) -> None:
    """An adapter that has learned: B of a new one is zero, and A's gradient with it."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.trainable_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)


def _keep_finite(ranks: Any, kept: dict[str, Any]) -> None:
    sum_gradients = ranks.sum_gradients
    kept["finite"] = ()

    def keeping(parameters: list[torch.nn.Parameter]) -> None:
        finite = all(bool(p.grad.isfinite().all()) for p in parameters if p.grad is not None)
        kept["finite"] += (finite,)
        sum_gradients(parameters)

    ranks.sum_gradients = keeping


def _keep_gradients(policy: Any, optimizer: Any, kept: dict[str, Any]) -> None:
    step = optimizer.step

    def keeping(**given: Any) -> Any:
        named = policy.named_trainable_parameters()
        kept["gradients"] = {name: p.grad.clone() for name, p in named.items()}
        return step(**given)

    optimizer.step = keeping


def _keep_most_weights(policy: Any, kept: dict[str, Any]) -> None:
    kept["most_weights"] = 0

    def count(*_: Any) -> None:
        kept["most_weights"] = max(kept["most_weights"], _num_weights(policy))

    for name, module in policy.modules():
        if name.startswith("model.layers.") and name.count(".") == 2:
            module.register_forward_pre_hook(count)


def _num_weights(policy: Any) -> int:
    return sum(_held(p) for _, m in policy.modules() for p in m.parameters(recurse=False))


def _held(parameter: Any) -> int:
    local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return 0 if parameter.requires_grad else local.numel()


def _die_in_the_first_pass() -> None:
    from trainer_service import policy

    owner: Any = policy.Policy
    hidden = owner._hidden

    def last(*args: Any) -> Any:
        hidden(*args)
        os.kill(os.getpid(), signal.SIGKILL)

    owner._hidden = last
