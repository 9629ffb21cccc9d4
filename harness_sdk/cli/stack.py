"""The services of one machine as one async context manager: `octopus up`, the demo, the tests.

Valkey and the broker are embedded unless a URL is given; rollout and trainer are subprocesses
that read their addresses and the token from the environment.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness_sdk.cli.embedded import ValkeyServer, embedded_broker
from harness_sdk.cli.logs import log_arguments
from harness_sdk.cli.processes import spawn, stop
from harness_sdk.cli.settings import render_toml
from harness_sdk.cli.stack_layout import ServicePlan, replica_plans, rollout_config, trainer_plan
from harness_sdk.errors import ServiceError, Unavailable

if TYPE_CHECKING:
    from harness_sdk.cli.stack_config import StackConfig

logger = logging.getLogger(__name__)

_POLL_S = 0.05
_LOG_TAIL_BYTES, _LOG_TAIL_LINES, _LOG_LINE_CHARS = 8000, 3, 600
_RESTART_PAUSE_S, _MAX_RESTART_PAUSE_S = 0.2, 10.0
_SETTLED_S = 60.0
"""A replica that has served for so long had a good start."""
_MAX_QUICK_ENDS = 8
"""Ends in a row without one. Their pauses add up to about 22 s, in which memory that a killed
process held is free again."""


class LocalStack:
    """Valkey, MQTT broker, rollout and trainer on this machine.

    Attributes:
        addresses: `host:port` of each replica of the rollout service.
        redis_url: Address of Redis, given or embedded.
        mqtt_url: Address of the MQTT broker, given or embedded.
        valkey: The embedded server; None where a URL was given.
        processes: The services by name, `rollout` or `rollout-0` and so on, and `trainer`, as far
            as they were started.
        num_starts: How often each of them was started.
    """

    def __init__(self, config: StackConfig) -> None:
        self._config = config
        self._exit = contextlib.AsyncExitStack()
        self._replicas = replica_plans(config)
        self.addresses: list[str] = []
        self.redis_url = config.redis_url or ""
        self.mqtt_url = config.mqtt_url or ""
        self.valkey: ValkeyServer | None = None
        self.processes: dict[str, asyncio.subprocess.Process] = {}
        self.num_starts: Counter[str] = Counter()

    @property
    def address(self) -> str:
        """The first replica's; empty where none was started."""
        return self.addresses[0] if self.addresses else ""

    async def __aenter__(self) -> LocalStack:
        try:
            await self._start()
        except BaseException:
            await self._exit.aclose()
            raise
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self._exit.aclose()

    def log_path(self, name: str) -> Path:
        """File that service `name` logs to."""
        return self._config.run_folder / f"{name}.log"

    async def start_trainer(self, settings: Mapping[str, Any] | None = None) -> None:
        """Start the trainer, again after it has ended; it resumes from its checkpoint.

        Args:
            settings: Win over those of the configuration.

        Raises:
            ConfigError: The trainer would refuse them.
        """
        await self._start_service(trainer_plan(self._config, settings))

    async def until_ended(self, name: str) -> None:
        """Wait until service `name` has done its work.

        Raises:
            ServiceError: It ended with an error.
        """
        await self._watch(name, self.processes[name])

    async def supervise(self) -> None:
        """Run until cancelled; restarts the embedded Valkey, which loses nothing by it, and a
        replica where others serve meanwhile.

        Raises:
            ServiceError: A service ended with an error.
        """
        several = {plan.name: plan for plan in self._replicas if len(self._replicas) > 1}
        watchers = [
            self._keep_replica(several[name]) if name in several else self._watch(name, process)
            for name, process in self.processes.items()
        ]
        if self.valkey is not None:
            watchers.append(self._keep_valkey(self.valkey))
        tasks = [asyncio.create_task(watcher) for watcher in (*watchers, asyncio.Event().wait())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _start(self) -> None:
        for plan in self._replicas:
            # Before anything starts: what the service would say after the servers.
            rollout_config(plan).require_engine()
        self._config.run_folder.mkdir(parents=True, exist_ok=True)
        if not self.redis_url:
            self.valkey = ValkeyServer(self._config.run_folder / "valkey")
            # Registered first: it stops last, when the services have sent what they hold.
            self._exit.push_async_callback(self.valkey.stop)
            await self.valkey.start()
            self.redis_url = self.valkey.url
        if not self.mqtt_url:
            self.mqtt_url = await self._exit.enter_async_context(embedded_broker())
        # Together: each may take minutes to load its model.
        starting = [asyncio.create_task(self._start_replica(plan)) for plan in self._replicas]
        try:
            self.addresses = list(await asyncio.gather(*starting))
        finally:
            for task in starting:
                task.cancel()
            await asyncio.gather(*starting, return_exceptions=True)
        if self._config.with_trainer:
            await self.start_trainer()

    async def _start_service(self, plan: ServicePlan) -> None:
        path = self._config.run_folder / f"{plan.name}.toml"
        await asyncio.to_thread(path.write_text, render_toml(plan.settings), "utf-8")
        process = await spawn(
            [*plan.argv(path), *log_arguments()],
            log_path=self.log_path(plan.name),
            environment={**self._environment(), **plan.environment()},
        )
        self.processes[plan.name] = process
        self.num_starts[plan.name] += 1
        self._exit.push_async_callback(stop, process, self._config.stop_s)
        logger.info(
            "%s started as process %d, log in %s", plan.name, process.pid, self.log_path(plan.name)
        )

    def _environment(self) -> dict[str, str]:
        environment = {"OCTOPUS_REDIS_URL": self.redis_url, "OCTOPUS_MQTT_URL": self.mqtt_url}
        if self._config.token is not None:
            environment["OCTOPUS_TOKEN"] = self._config.token.get_secret_value()
        if self._config.threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._config.threads)
        return environment

    async def _start_replica(self, plan: ServicePlan) -> str:
        """Start a rollout service and wait for it to say where it listens."""
        from rollout_service.config import ADDRESS_FILE

        path = rollout_config(plan).folder / ADDRESS_FILE
        path.unlink(missing_ok=True)
        await self._start_service(plan)
        process = self.processes[plan.name]
        try:
            async with asyncio.timeout(self._config.start_s):
                while not path.exists():
                    if process.returncode is not None:
                        raise self._ended(plan.name, process.returncode)
                    await asyncio.sleep(_POLL_S)
        except TimeoutError as error:
            raise Unavailable(
                "the rollout service did not listen in time",
                limit=f"{self._config.start_s:g} s",
                remedy=f"see {self.log_path(plan.name)} or raise start_s",
            ) from error
        return path.read_text("utf-8")

    async def _keep_replica(self, plan: ServicePlan) -> None:
        """Start a replica again whenever it ends with an error while another one serves.

        Raises:
            ServiceError: No other one serves, or it ended `_MAX_QUICK_ENDS` times in a row before
                it had settled.
        """
        served_since, num_quick = time.monotonic(), 0
        while status := await self.processes[plan.name].wait():
            settled = time.monotonic() - served_since > _SETTLED_S
            num_quick = 1 if settled else num_quick + 1
            others = (self.processes[each.name] for each in self._replicas if each is not plan)
            if num_quick >= _MAX_QUICK_ENDS or all(each.returncode is not None for each in others):
                raise self._ended(plan.name, status, num_quick)
            pause_s = min(_RESTART_PAUSE_S * 2 ** (num_quick - 1), _MAX_RESTART_PAUSE_S)
            logger.error(
                "%s ended with status %d; starting it again in %g s", plan.name, status, pause_s
            )
            await asyncio.sleep(pause_s)
            await self._restart_replica(plan)
            served_since = time.monotonic()
        logger.info("%s has finished", plan.name)

    async def _restart_replica(self, plan: ServicePlan) -> None:
        """Start it; one that ends before it listens is left to be seen as ended."""
        try:
            address = await self._start_replica(plan)
        except ServiceError:
            if self.processes[plan.name].returncode is None:
                raise
        else:
            self.addresses[self._replicas.index(plan)] = address

    async def _watch(self, name: str, process: asyncio.subprocess.Process) -> None:
        status = await process.wait()
        if status != 0:
            raise self._ended(name, status)
        logger.info("%s has finished", name)

    async def _keep_valkey(self, server: ValkeyServer) -> None:
        while server.process is not None:
            status = await server.process.wait()
            logger.error("the embedded Valkey server ended with status %d; restarting it", status)
            await asyncio.sleep(_RESTART_PAUSE_S)
            await server.start()

    def _ended(self, name: str, status: int, times: int = 1) -> ServiceError:
        often = f" {times} times in a row soon after its start" if times > 1 else ""
        return ServiceError(
            f"the {name} service ended{often}",
            value=f"status {status}",
            remedy=f"see {self.log_path(name)}: {_tail(self.log_path(name))}",
        )


def _tail(path: Path) -> str:
    """The last lines of a log, each cut to what a screen holds; progress bars left out."""
    with contextlib.suppress(OSError):
        lines = path.read_bytes()[-_LOG_TAIL_BYTES:].decode("utf-8", "replace").splitlines()
        told = [line[:_LOG_LINE_CHARS] for line in lines if line.strip() and "it/s]" not in line]
        # Where several processes end, torchrun's long report stands behind what they said.
        said = [line for line in told if line.startswith("octopus ")]
        return "\n".join(["", *(said or told)[-_LOG_TAIL_LINES:]])
    return ""
