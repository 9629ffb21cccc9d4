"""LoRA versions of this replica: fetch, check, load beside the running ones, prove, report.

An announcement that cannot be served changes nothing but the state's `error`. Adapters are
safetensors alone, of bounded size, and are copied before they are checked.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import shutil
from collections.abc import Awaitable, Callable, Collection
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from harness_sdk import control
from harness_sdk.control import PolicyAnnouncement, ReplicaState
from harness_sdk.errors import AdapterError, HarnessError, Unavailable
from rollout_service.background import Background
from rollout_service.engine.base import Engine

logger = logging.getLogger(__name__)

_MAX_CONFIG_BYTES = 1 << 20
_POLL_S = 0.05
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
        fetch: Fetches a `redis:` adapter.
        pinned: Versions that open episodes still sample under.
        max_versions: Adapters live at a time, version 0 aside.
        max_bytes: Largest file of tensors.
        slot_wait_s: How long a new version waits for an old one's episodes to end.
    """

    def __init__(
        self,
        engine: Engine,
        state: ReplicaState,
        *,
        run: str,
        folder: Path,
        fetch: Fetch,
        pinned: Callable[[], Collection[int]],
        max_versions: int = 4,
        max_bytes: int = 4 << 30,
        slot_wait_s: float = 300.0,
    ) -> None:
        self._engine = engine
        self._state = state
        self._run = run
        self._folder = folder
        self._fetch = fetch
        self._pinned = pinned
        self._max_versions = max_versions
        self._max_bytes = max_bytes
        self._slot_wait_s = slot_wait_s
        self._served: dict[int, str] = {0: ""}
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
        """Serve `announcement`, or say in the state's `error` why not.

        A repeat of a version that serves changes nothing.
        """
        async with self._lock:
            version = announcement.version
            if self._served.get(version) == announcement.sha256:
                return self._state
            try:
                self._state = await self._apply(announcement)
            except Exception as error:
                # It comes from outside: whatever is wrong with it, the replica serves on.
                told = str(error)
                if not isinstance(error, HarnessError):
                    told = f"adapter {version} cannot be served: {error!r}"
                logger.error("adapter %d refused: %s", version, told)
                self._state = replace(self._state, error=told, error_version=version)
            return self._state

    async def start(self) -> None:
        """Remove what an earlier process left in the cache."""
        await _remove(self._folder)

    async def close(self) -> None:
        """Remove the cached files."""
        await self._background.settle()
        await _remove(self._folder)

    async def _apply(self, announcement: PolicyAnnouncement) -> ReplicaState:
        version = announcement.version
        self._check_announcement(announcement)
        folder = self._folder / f"version-{version}"
        await asyncio.to_thread(_make_empty, folder)
        try:
            await self._bring(announcement, folder)
            await asyncio.to_thread(_check_files, announcement, folder)
            await self._free_slot()
            await self._engine.load_adapter(version, str(folder))
        except BaseException:
            await self._background.finish(_remove(folder))
            raise
        try:
            checksums = await self._engine.adapter_checksums(version)
            probe = await self._engine.score(announcement.probe_token_ids, policy_version=version)
        except BaseException:
            # Loaded and unproven: no episode may begin with it.
            await self._background.finish(self._unload(version))
            raise
        self._served[version] = announcement.sha256
        logger.info("version %d serves; live: %s", version, sorted(self._served))
        return replace(
            self._state,
            versions=tuple(sorted(self._served)),
            checksums=checksums,
            probe_logprobs=probe,
            error="",
            error_version=0,
        )

    def _check_announcement(self, announcement: PolicyAnnouncement) -> None:
        version, newest = announcement.version, self.newest()
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
        if len(announcement.probe_token_ids) < 2:
            raise AdapterError(f"adapter {version} comes without a probe of two tokens or more")

    async def _bring(self, announcement: PolicyAnnouncement, folder: Path) -> None:
        """Copy the adapter's two files to `folder`."""
        version, uri = announcement.version, announcement.uri
        if uri == f"redis:{control.adapter_key(self._run, version)}":
            await self._fetch_patiently(version, folder)
        elif urlsplit(uri).scheme == "file":
            source = Path(unquote(urlsplit(uri).path))
            await asyncio.to_thread(_copy, version, source, folder, self._max_bytes)
        else:
            raise AdapterError(
                f"adapter {version} is nowhere that this replica looks",
                value=uri,
                limit=f"redis:{control.adapter_key(self._run, version)} or file:///folder",
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

    async def _free_slot(self) -> None:
        """Unload the oldest unpinned versions until one more fits."""
        give_up = asyncio.get_running_loop().time() + self._slot_wait_s
        while len(self._served) - 1 >= self._max_versions:
            pinned = set(self._pinned())
            if await self._unload_oldest(pinned):
                continue
            if asyncio.get_running_loop().time() > give_up:
                raise AdapterError(
                    "no room for another version: open episodes hold the old ones",
                    value=f"{sorted(pinned & set(self._served))} held",
                    limit=f"{self._max_versions} versions",
                    remedy="raise adapters.max_versions or open episodes with version_policy"
                    " refresh",
                )
            await asyncio.sleep(_POLL_S)

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
        await _remove(self._folder / f"version-{version}")


async def _remove(folder: Path) -> None:
    await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


def _make_empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)


def _copy(version: int, source: Path, folder: Path, max_bytes: int) -> None:
    for name, limit in (
        (control.ADAPTER_FILE, max_bytes),
        (control.ADAPTER_CONFIG_FILE, _MAX_CONFIG_BYTES),
    ):
        try:
            size = (source / name).stat().st_size
        except FileNotFoundError as error:
            raise AdapterError(
                f"adapter {version} has no {name}",
                value=source,
                remedy="write it with safetensors, in PEFT's format, where every replica can read",
            ) from error
        if size > limit:
            raise AdapterError(
                f"{name} of adapter {version} is too large",
                value=f"{size} bytes",
                limit=f"{limit} bytes",
                remedy="raise adapters.max_bytes or lower the rank",
            )
        shutil.copyfile(source / name, folder / name)


def _check_files(announcement: PolicyAnnouncement, folder: Path) -> None:
    """Compare the copied files with what was announced."""
    version = announcement.version
    with (folder / control.ADAPTER_FILE).open("rb") as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    _expect(f"sha256 of adapter {version}", sha256, announcement.sha256)
    names = _tensor_names(version, folder / control.ADAPTER_FILE)
    _expect(f"number of tensors of adapter {version}", len(names), announcement.num_tensors)
    try:
        config = json.loads((folder / control.ADAPTER_CONFIG_FILE).read_bytes())
        rank, alpha = config["r"], config["lora_alpha"]
    except (ValueError, KeyError, TypeError) as error:
        raise AdapterError(
            f"{control.ADAPTER_CONFIG_FILE} of adapter {version} is not PEFT's", value=error
        ) from error
    _expect(f"rank of adapter {version}", rank, announcement.rank)
    _expect(f"alpha of adapter {version}", float(alpha), announcement.alpha)


def _tensor_names(version: int, path: Path) -> list[str]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            return list(file.keys())
    except SafetensorError as error:
        raise AdapterError(f"adapter {version} is no safetensors file", value=error) from error


def _expect(what: str, found: Any, announced: Any) -> None:
    if found != announced:
        raise AdapterError(
            f"{what} is not the announced one",
            value=found,
            limit=announced,
            remedy="publish the version again",
        )
