"""Where a step's figures go beside the run folder: TensorBoard, Weights & Biases, Prometheus."""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import logging
from collections.abc import Iterator, Mapping
from typing import Any, Protocol

from harness_sdk.errors import ConfigError
from harness_sdk.exposition import exposed
from harness_sdk.masking import masked
from trainer_service.config import TrainerConfig

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Takes the figures of each step."""

    def __call__(self, step: int, values: Mapping[str, float]) -> None: ...


@contextlib.contextmanager
def open_sinks(config: TrainerConfig) -> Iterator[list[Sink]]:
    """The sinks that `config.report` asks for, closed when the block ends.

    Blocking: Weights & Biases is asked over the network.

    Raises:
        ConfigError: The package of one is not installed, or it refuses the run.
    """
    report = config.report
    with contextlib.ExitStack() as stack:
        sinks: list[Sink] = []
        if report.tensorboard:
            sinks.append(stack.enter_context(_tensorboard(config)))
        if report.wandb_project is not None:
            sinks.append(stack.enter_context(_wandb(config, report.wandb_project)))
        if report.prometheus_port is not None:
            sinks.append(stack.enter_context(_prometheus(config, report.prometheus_port)))
        yield sinks


async def opened_sinks(config: TrainerConfig, stack: contextlib.AsyncExitStack) -> list[Sink]:
    """`open_sinks` on a thread, closed on one with `stack`: a site may answer slowly."""
    opening = open_sinks(config)
    sinks = await asyncio.to_thread(opening.__enter__)
    stack.push_async_callback(asyncio.to_thread, opening.__exit__, None, None, None)
    return sinks


@contextlib.contextmanager
def _tensorboard(config: TrainerConfig) -> Iterator[Sink]:
    writer: Any = _package("torch.utils.tensorboard", "report.tensorboard").SummaryWriter(
        str(config.folder / "tensorboard")
    )

    def write(step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            writer.add_scalar(name, value, step)
        writer.flush()

    try:
        yield write
    finally:
        writer.close()


@contextlib.contextmanager
def _wandb(config: TrainerConfig, project: str) -> Iterator[Sink]:
    """A restarted trainer goes on with the run of the same name."""
    wandb: Any = _package("wandb", "report.wandb_project")
    try:
        run = wandb.init(
            project=project, id=config.run, name=config.run, resume="allow",
            dir=str(config.folder), config=masked(config.model_dump(mode="json")),
        )  # fmt: skip
    # Its errors have no common base: no login, no network, a project that is not ours.
    except Exception as error:
        raise ConfigError(
            "Weights & Biases does not take the run",
            value=f"{type(error).__name__}: {error}",
            remedy="wandb login, or WANDB_MODE=offline, or remove report.wandb_project",
        ) from error
    try:
        yield lambda step, values: run.log(dict(values), step=step)
    finally:
        run.finish()


@contextlib.contextmanager
def _prometheus(config: TrainerConfig, port: int) -> Iterator[Sink]:
    newest: dict[str, float] = {}

    def write(step: int, values: Mapping[str, float]) -> None:
        nonlocal newest
        # Replaced whole: the server reads it on a thread of its own.
        newest = {**newest, **values}

    labels = {"run": config.run}
    with exposed(
        "trainer", lambda: newest, host=config.report.prometheus_host, port=port, labels=labels
    ) as address:
        log.info("Prometheus metrics at http://%s/metrics", address)
        (config.folder / "metrics.address").write_text(address, "utf-8")
        yield write


def _package(name: str, option: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"{option} needs a package that is not installed",
            value=str(error),
            remedy="pip install 'octopus-agents[metrics]', or remove the option",
        ) from error
