"""The engine without a model: cursors as any engine makes them, nothing computed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from harness_sdk.errors import AdapterError, BudgetExhausted, InvalidRequest
from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Mount
from rollout_service.engine.base import Engine
from rollout_service.engine.dry import DRY_INFO, DryEngine


async def test_extend_with_mount_jumps_position_and_scores_zero() -> None:
    engine: Engine = DryEngine()
    root = await engine.extend(None, (1, 2, 3), mounts=(), policy_version=0)
    peer = await engine.extend(root, (4,) * 7, mounts=(), policy_version=0)
    reader = await engine.extend(
        root,
        (5, 6, 7),
        mounts=(Mount(source=peer, begin=2, end=6),),
        policy_version=0,
        score_from=1,
    )
    assert (root.position_start, peer.position_start, reader.position_start) == (0, 3, 9)
    assert reader.sampled == (False, True, True)
    assert reader.sampled_logprobs == (0.0, 0.0)
    assert engine.stats().tokens_resident == 13
    await engine.release([root, peer, reader])
    assert engine.stats().resident_cursors == 0
    assert engine.stats().tokens_computed == 13


async def test_requests_no_model_could_compute_are_refused() -> None:
    engine = DryEngine(info=replace(DRY_INFO, vocab_size=10, max_positions=4))
    with pytest.raises(InvalidRequest, match="outside the vocabulary; got 10"):
        await engine.extend(None, (10,), mounts=(), policy_version=0)
    with pytest.raises(InvalidRequest, match="no tokens"):
        await engine.extend(None, (), mounts=(), policy_version=0)
    with pytest.raises(BudgetExhausted, match="got 5; allowed: 4"):
        await engine.extend(None, (1,) * 5, mounts=(), policy_version=0)
    with pytest.raises(AdapterError, match="not loaded; got 3; allowed: 0"):
        await engine.extend(None, (1,), mounts=(), policy_version=3)
    root = await engine.extend(None, (1,), mounts=(), policy_version=0)
    with pytest.raises(InvalidRequest, match="outside its source"):
        mount = Mount(source=root, begin=0, end=2)
        await engine.extend(root, (1,), mounts=(mount,), policy_version=0)
    with pytest.raises(InvalidRequest, match="no model to sample"):
        engine.generate(root, (1,), SamplingOptions(), stop_token_ids=frozenset(), policy_version=0)
    assert engine.stats().resident_cursors == 1


async def test_versions_come_and_go() -> None:
    engine = DryEngine()
    await engine.load_adapter(2, "anywhere")
    with pytest.raises(AdapterError, match="loaded already"):
        await engine.load_adapter(2, "anywhere")
    await engine.extend(None, (1, 2), mounts=(), policy_version=2)
    assert await engine.adapter_checksums(2) == {}
    assert await engine.score((1, 2, 3), policy_version=2) == (0.0, 0.0)
    await engine.unload_adapter(2)
    assert engine.stats().tokens_resident == 0
    with pytest.raises(AdapterError, match="not loaded"):
        await engine.score((1, 2), policy_version=2)


def test_import_leaves_torch_out() -> None:
    code = "import sys, rollout_service.engine.dry; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
