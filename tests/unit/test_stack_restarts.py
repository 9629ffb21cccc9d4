"""A replica that ends is started again, but not for ever."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from harness_sdk.cli import stack as module
from harness_sdk.cli.stack import LocalStack
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.cli.stack_layout import ServicePlan, replica_plans, rollout_config
from harness_sdk.errors import ServiceError
from rollout_service.config import ADDRESS_FILE


class _Failing(LocalStack):
    """The first replica runs `script` in the place of its program, the second only waits."""

    script = ""

    async def _start_service(self, plan: ServicePlan) -> None:
        folder = rollout_config(plan).folder
        folder.mkdir(parents=True, exist_ok=True)
        is_first = plan.name == "rollout-0"
        self.processes[plan.name] = await asyncio.create_subprocess_exec(
            "sh", "-c", self.script if is_first else "exec sleep 60",
            env={"ADDRESS": str(folder / ADDRESS_FILE), "LOG": str(self.log_path(plan.name))},
        )  # fmt: skip
        self.num_starts[plan.name] += 1


@pytest.mark.parametrize(
    "script",
    ["echo no memory >> $LOG; exit 3", "echo no memory >> $LOG; echo h:1 > $ADDRESS; exit 3"],
    ids=["before it listens", "once it listens"],
)
async def test_a_replica_that_ends_at_every_start_is_given_up(
    script: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(module, "_MAX_QUICK_ENDS", 5)
    monkeypatch.setattr(module, "_RESTART_PAUSE_S", 0.01)
    monkeypatch.setattr(module, "_MAX_RESTART_PAUSE_S", 0.03)
    config = StackConfig(model=tmp_path, folder=tmp_path, replicas=2, with_trainer=False)
    stack = _Failing(config)
    stack.script, stack.addresses = script, ["h:0", "h:0"]
    for plan in replica_plans(config):
        await stack._start_service(plan)
    try:
        with pytest.raises(ServiceError) as caught:
            async with asyncio.timeout(10):
                await stack.supervise()
    finally:
        stack.processes["rollout-1"].kill()
        await stack.processes["rollout-1"].wait()
    told = str(caught.value)
    assert "rollout-0 service ended 5 times in a row" in told and "status 3" in told
    assert str(stack.log_path("rollout-0")) in told and "no memory" in told
    told_pauses = [text.split("again in ")[1] for text in caplog.messages if "again in " in text]
    assert told_pauses == ["0.01 s", "0.02 s", "0.03 s", "0.03 s"], "they grow up to a bound"
    assert stack.num_starts == {"rollout-0": 5, "rollout-1": 1}
