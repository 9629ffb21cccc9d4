"""LoRA versions of a running vLLM engine: loaded beside decodes, dropped with their residency."""

from __future__ import annotations

import asyncio

import torch

from harness_sdk.errors import AdapterError
from rollout_service.engine.vllm.builder import FootingBuilder
from rollout_service.engine.vllm.lora import (
    AdapterReader,
    LoadedAdapter,
    expected_tensors,
    lora_specs,
    told_checksums,
)


class Adapters:
    """Puts versions into the builder's table and vLLM's slots, and takes them out."""

    def __init__(
        self,
        builder: FootingBuilder,
        reader: AdapterReader,
        *,
        max_adapters: int,
        max_rank: int,
        dtype: torch.dtype,
    ) -> None:
        """Serve up to `max_adapters` versions beside the base model.

        Args:
            builder: Holds the table of versions and speaks to the core.
            reader: Reads PEFT folders.
            max_adapters: Slots.
            max_rank: Highest rank that a slot holds.
            dtype: Of the serving buffers.
        """
        self.reader = reader
        self.max_rank = max_rank
        self.dtype = dtype
        self._builder = builder
        self._max_adapters = max_adapters
        self._lock = asyncio.Lock()

    async def load(self, version: int, path: str) -> None:
        """Load a PEFT folder as `version`; see `Engine.load_adapter`."""
        self._check_new(version)
        adapter = await asyncio.to_thread(self.reader.read, path, max_rank=self.max_rank)
        async with self._lock:
            self._check_new(version)
            # Hashed on threads while vLLM loads.
            expected = asyncio.ensure_future(
                asyncio.to_thread(expected_tensors, adapter, self.dtype)
            )
            request = await self._builder.client.load_lora(version, path)
            self._builder.adapters[version] = LoadedAdapter(
                specs=lora_specs(adapter), expected=expected, request=request
            )

    async def unload(self, version: int, *, is_running: bool) -> None:
        """Drop a version and all residency computed under it.

        Raises:
            AdapterError: The base model, or in use by a running request.
        """
        if version == 0 or is_running:
            raise AdapterError(
                "policy version cannot be unloaded",
                value=version,
                limit="an adapter that no running request uses",
            )
        del self._builder.adapters[version]
        await self._builder.drop_version(version)
        async with self._lock:
            await self._builder.client.unload_lora(version)

    async def checksums(self, version: int) -> dict[str, str]:
        """`tensor_checksum` of each tensor as it serves, keyed by its PEFT name."""
        loaded = self._builder.adapters[version]
        if loaded is None:
            return {}
        await self._builder.client.hash_lora(version, loaded.specs)
        # Takes about as long on this side, so that steps wait for nothing.
        expected = await asyncio.shield(loaded.expected)
        served = await self._builder.client.lora_checksums(version)
        return told_checksums(loaded.specs, expected, served)

    def _check_new(self, version: int) -> None:
        loaded = self._builder.adapters
        if version in loaded:
            raise AdapterError(
                "policy version is loaded already",
                value=version,
                limit="versions that are not loaded",
            )
        if len(loaded) > self._max_adapters:
            raise AdapterError(
                "no room for another policy version",
                value=f"{len(loaded) - 1} loaded",
                limit=self._max_adapters,
                remedy="unload one, or start the engine with a larger max_adapters",
            )
