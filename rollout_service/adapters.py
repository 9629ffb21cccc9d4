"""LoRA versions of this replica: fetch, check, load beside the running ones, prove, report.

An announcement that cannot be served changes nothing but the state's `error`; one that finds no
free slot waits for it, and a newer one takes its place. Adapters are safetensors alone, of bounded
size, and are copied before they are checked.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from harness_sdk import control
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from harness_sdk.errors import AdapterError, HarnessError, Unavailable
from rollout_service.adapter_files import (
    check_files,
    check_sha256,
    copy_adapter,
    make_empty,
    shared_folder,
)
from rollout_service.background import Background
from rollout_service.engine.base import Engine
from rollout_service.engine.checks import check_probe

logger = logging.getLogger(__name__)

_POLL_S = 0.05
HEARTBEAT_S = 5.0
"""Between two reports of a version that waits: the trainer knows by them that it still does."""
_FETCH_PAUSE_S, _FETCH_PATIENCE_S = 0.5, 60.0

Fetch = Callable[[int, Path], Awaitable[None]]
"""Writes the two files of a version to a folder, within the size that the caller fixed."""


class Adapters:
    """The versions that this replica serves.

    Args:
        engine: Started engine.
        state: This replica's state with version 0 alone.
        run: Run name; another run's adapters are refused.
        folder: Cache of adapter folders, this replica's own.
        shared: Folder of the run; `file:` adapters lie in it.
        fetch: Fetches a `redis:` adapter.
        pinned: Versions that open episodes still sample under.
        max_versions: Adapters live at a time, version 0 aside.
        max_bytes: Largest file of tensors.
    """

    def __init__(
        self,
        engine: Engine,
        state: ReplicaState,
        *,
        run: str,
        folder: Path,
        shared: Path,
        fetch: Fetch,
        pinned: Callable[[], Collection[int]],
        max_versions: int = 4,
        max_bytes: int = 4 << 30,
    ) -> None:
        self._engine = engine
        self._state = state
        self._run = run
        self._folder = folder
        self._shared = shared
        self._fetch = fetch
        self._pinned = pinned
        self._max_versions = max_versions
        self._max_bytes = max_bytes
        self._served: dict[int, str] = {0: ""}
        self._waiting: PolicyAnnouncement | None = None
        """Brought, checked, and without a slot."""
        self._waiting_since_s = 0.0
        self._waits = asyncio.Event()
        self._lock = asyncio.Lock()
        self._background = Background()

    @property
    def state(self) -> ReplicaState:
        """What this replica retains about itself."""
        return self._state

    def advertise(self, address: str) -> None:
        """Tell in the state where this replica is reached."""
        self._state = replace(self._state, address=address)

    def newest(self) -> int:
        """Version that new episodes begin with."""
        return max(self._served)

    async def apply(self, announcement: PolicyAnnouncement) -> ReplicaState:
        """Serve `announcement`, or let it wait for a slot, or say in the state's `error` why not.

        A repeat of a version that serves or waits changes nothing. What waits is served by
        `serve_waiting`, unless a newer one takes its place first.
        """
        async with self._lock:
            version = announcement.version
            served = self._served.get(version) == announcement.sha256
            if not served and announcement != self._waiting:
                try:
                    await self._apply(announcement)
                except Exception as error:
                    # It comes from outside: whatever is wrong with it, the replica serves on.
                    self._refuse(version, error)
            return self._state

    async def serve_waiting(self, report: Callable[[ReplicaState], None]) -> None:
        """Load what waits once an old version's episodes have ended; runs until cancelled.

        Args:
            report: Given the state once it serves, and every few seconds while it waits.
        """
        while True:
            await self._waits.wait()
            async with self._lock:
                before = self._state
                await self._retry()
                if self._state is not before:
                    report(self._state)
            await asyncio.sleep(_POLL_S)

    async def start(self) -> None:
        """Remove what an earlier process left in the cache."""
        await _remove(self._folder)

    async def close(self) -> None:
        """Remove the cached files."""
        await self._background.settle()
        await _remove(self._folder)

    async def _apply(self, announcement: PolicyAnnouncement) -> None:
        version = announcement.version
        self._check_announcement(announcement)
        folder = self._adapter_folder(version)
        if self._waiting is not None and self._waiting.version == version:
            # Its files are written over.
            self._set_waiting(None)
        try:
            await asyncio.to_thread(make_empty, folder)
            await self._bring(announcement, folder)
            await asyncio.to_thread(check_files, announcement, folder)
            has_slot = self._waiting is None and await self._free_slot()
            if not has_slot:
                # What waits gives its place to a whole one alone.
                await asyncio.to_thread(check_sha256, announcement, folder)
        except BaseException as error:
            await self._background.finish(_remove(folder))
            if isinstance(error, OSError) and not isinstance(error, HarnessError):
                raise AdapterError(
                    f"adapter {version} cannot be written to this replica's disk",
                    value=f"{folder}: {error.strerror or error}",
                    remedy="make room there, or set run_folder elsewhere; the next version is"
                    " tried anew",
                ) from error
            raise
        if self._waiting is not None:
            logger.info("version %d takes the place of %d", version, self._waiting.version)
            await _remove(self._adapter_folder(self._waiting.version))
        if has_slot or await self._free_slot():
            await self._load(announcement)
        else:
            self._wait(announcement)

    async def _retry(self) -> None:
        waiting = self._waiting
        if waiting is None:
            self._waits.clear()
            return
        try:
            if await self._free_slot():
                await self._load(waiting)
            elif self._waited_s() >= self._state.waiting_s + HEARTBEAT_S:
                self._tell_waiting(waiting.version)
        except Exception as error:
            # As in `apply`: a version that the engine refuses late is refused all the same.
            self._refuse(waiting.version, error)

    async def _load(self, announcement: PolicyAnnouncement) -> None:
        """Load, prove and serve a version that is on disk, in the slot that is free for it."""
        version, folder = announcement.version, self._adapter_folder(announcement.version)
        self._set_waiting(None)
        try:
            # Hashed meanwhile, which takes as long: nothing serves before both are done.
            other_bytes, failure = await asyncio.gather(
                asyncio.to_thread(check_sha256, announcement, folder),
                self._engine.load_adapter(version, str(folder)),
                return_exceptions=True,
            )
            if failure is not None:
                raise other_bytes or failure
        except BaseException:
            await self._background.finish(_remove(folder))
            raise
        try:
            if other_bytes is not None:
                raise other_bytes
            checksums, probe = await self._prove(announcement)
        except BaseException:
            # Loaded and unproven: no episode may begin with it.
            await self._background.finish(self._unload(version))
            raise
        self._served[version] = announcement.sha256
        logger.info("version %d serves; live: %s", version, sorted(self._served))
        self._state = replace(
            self._state,
            versions=tuple(sorted(self._served)),
            checksums=checksums,
            probe_logprobs=probe,
            error="",
            error_version=0,
        )

    async def _prove(
        self, announcement: PolicyAnnouncement
    ) -> tuple[dict[str, str], tuple[float, ...]]:
        """Checksums of what serves and log-probabilities of the probe, both at a time."""
        version, engine = announcement.version, self._engine
        try:
            async with asyncio.TaskGroup() as group:
                checksums = group.create_task(engine.adapter_checksums(version))
                probe = group.create_task(
                    engine.score(announcement.probe_token_ids, policy_version=version)
                )
        except BaseExceptionGroup as failed:
            raise failed.exceptions[0] from failed
        return checksums.result(), probe.result()

    def _wait(self, announcement: PolicyAnnouncement) -> None:
        """Nothing is wrong with `announcement`: it is served when a slot frees."""
        version = announcement.version
        if self._waiting is None:
            self._waiting_since_s = _now_s()
        self._set_waiting(announcement)
        self._state = replace(self._state, error="", error_version=0)
        self._tell_waiting(version)
        logger.warning(
            "version %d waits for a slot: %s; it is served once their episodes end",
            version,
            self._state.waiting_for,
        )

    def _set_waiting(self, announcement: PolicyAnnouncement | None) -> None:
        self._waiting = announcement
        if announcement is not None:
            self._waits.set()
        else:
            self._state = replace(self._state, waiting_version=0, waiting_for="", waiting_s=0.0)

    def _tell_waiting(self, version: int) -> None:
        # Whatever nothing held is unloaded by now.
        held = sorted(set(self._served) - {0, self.newest()})
        self._state = replace(
            self._state,
            waiting_version=version,
            waiting_for=f"open episodes hold versions {', '.join(map(str, held))} and"
            f" {self.newest()} is the newest; adapters.max_versions is {self._max_versions}",
            waiting_s=self._waited_s(),
        )

    def _waited_s(self) -> float:
        return _now_s() - self._waiting_since_s

    def _refuse(self, version: int, error: Exception) -> None:
        told = str(error)
        if not isinstance(error, HarnessError):
            told = f"adapter {version} cannot be served: {error!r}"
        logger.error("adapter %d refused: %s", version, told)
        self._state = replace(self._state, error=told, error_version=version)

    def _check_announcement(self, announcement: PolicyAnnouncement) -> None:
        version, newest = announcement.version, self.newest()
        if self._waiting is not None:
            # The same version with other bytes may still take its place.
            newest = max(newest, self._waiting.version - 1)
        if version <= newest:
            raise AdapterError(
                f"adapter {version} is not newer than what serves",
                value=version,
                limit=f"above {newest}",
                remedy="publish under a higher version, across restarts too",
            )
        base = self._engine.info.model_hash
        if announcement.base_model != base:
            raise AdapterError(
                f"adapter {version} belongs to another base model",
                value=announcement.base_model,
                limit=base,
                remedy="give trainer and rollout the same model folder",
            )
        check_probe(self._engine.info, announcement.probe_token_ids)

    async def _bring(self, announcement: PolicyAnnouncement, folder: Path) -> None:
        """Copy the adapter's two files to `folder`."""
        version, uri = announcement.version, announcement.uri
        if uri == f"redis:{control.adapter_key(self._run, version)}":
            await self._fetch_patiently(version, folder)
        elif urlsplit(uri).scheme == "file":
            source = await asyncio.to_thread(shared_folder, version, uri, self._shared)
            await asyncio.to_thread(copy_adapter, version, source, folder, self._max_bytes)
        else:
            raise AdapterError(
                f"adapter {version} is nowhere that this replica looks",
                value=uri,
                limit=f"redis:{control.adapter_key(self._run, version)}, or file:///folder in"
                f" {self._shared}",
            )

    async def _fetch_patiently(self, version: int, folder: Path) -> None:
        """Fetch through a restart of Redis: the announcement does not come a second time."""
        give_up = asyncio.get_running_loop().time() + _FETCH_PATIENCE_S
        while True:
            try:
                return await self._fetch(version, folder)
            except Unavailable as error:
                if asyncio.get_running_loop().time() > give_up:
                    raise
                logger.warning("cannot fetch adapter %d yet: %s", version, error)
            await asyncio.sleep(_FETCH_PAUSE_S)

    async def _free_slot(self) -> bool:
        """Unload the oldest unpinned versions until one more fits; False where it does not."""
        while len(self._served) - 1 >= self._max_versions:
            if not await self._unload_oldest(set(self._pinned())):
                return False
        return True

    async def _unload_oldest(self, pinned: Collection[int]) -> bool:
        """Unload the oldest version that nothing holds; whether there was one."""
        for version in sorted(set(self._served) - set(pinned) - {0, self.newest()}):
            try:
                await self._unload(version)
            except AdapterError:
                # A turn of an episode that refreshes still runs on it.
                continue
            del self._served[version]
            self._state = replace(self._state, versions=tuple(sorted(self._served)))
            return True
        return False

    async def _unload(self, version: int) -> None:
        await self._engine.unload_adapter(version)
        await _remove(self._adapter_folder(version))

    def _adapter_folder(self, version: int) -> Path:
        return self._folder / f"version-{version}"


def _now_s() -> float:
    return asyncio.get_running_loop().time()


async def _remove(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
