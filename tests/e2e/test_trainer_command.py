"""`octopus trainer` as its users start it."""

from __future__ import annotations

import asyncio
import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from harness_sdk import control
from harness_sdk.cli.embedded import embedded_broker
from harness_sdk.cli.processes import free_port, spawn, stop
from harness_sdk.record import record_to_bytes
from harness_sdk.records_file import write_records
from tests.records import small_record
from tests.tiny_models import save_tiny_model
from tests.valkey import embedded_valkey
from trainer_service.metrics import read_metrics
from trainer_service.stream import RedisLink

TRAINER = [sys.executable, "-m", "trainer_service"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3")


def _run(*flags: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
    shown = subprocess.run(
        [*TRAINER, *map(str, flags)], capture_output=True, text=True, timeout=120, check=False
    )
    assert shown.returncode == code, shown.stderr
    return shown


def test_dry_run_prints_the_resolved_configuration_without_torch(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('run = "from-file"\n[model]\npath = "m"\n[optim]\nlr = 0.5\n')
    shown = _run("--config", file, "--optim.lr", "0.25", "--dry-run", "json")
    config = json.loads(shown.stdout)
    assert (config["run"], config["optim"]["lr"]) == ("from-file", 0.25)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--objective", "ppo", "--model.path", "m"), "allowed: dag_grpo, path_average"),
        (("--objective", "sft", "--batch.max-policy-lag", "1", "--model.path", "m"), "sft"),
        ((), "--model.path"),
        (("--lr", "1"), "unknown configuration key lr"),
    ],
)
def test_bad_configuration_exits_with_what_to_do(flags: tuple[str, ...], said: str) -> None:
    shown = _run(*flags, code=1)
    assert said in shown.stderr
    assert "Traceback" not in shown.stderr


@pytest.mark.slow
def test_sft_from_a_file_leaves_a_run_folder_and_resumes(model: Path, tmp_path: Path) -> None:
    records = tmp_path / "r.records"
    write_records(
        records,
        [
            small_record(f"e{index}", token_ids=(5, 6, 7, 8 + index % 2), demonstration=True)
            for index in range(8)
        ],
    )
    flags = (
        "--objective", "sft", "--model.path", model, "--records", records, "--run", "r",
        "--run-folder", tmp_path, "--batch.episodes-per-step", "4", "--batch.epochs", "4",
        "--lora.rank", "2", "--optim.lr", "0.05",
    )  # fmt: skip
    shown = _run(*flags, "--max-steps", "3")
    assert "step 3: reward" in shown.stderr
    folder = tmp_path / "r"
    assert json.loads((folder / "config.json").read_text())["lora"]["rank"] == 2
    assert "resumed from checkpoint 3" in _run(*flags).stderr
    lines = read_metrics(folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == list(range(1, 9))
    assert lines[-1]["loss/total"] < lines[0]["loss/total"]
    adapters = sorted(path.name for path in (folder / "adapters").iterdir())
    assert adapters == ["5", "6", "7", "8"]
    assert (folder / "adapters" / "8" / control.ADAPTER_FILE).is_file()
    assert len(list((folder / "checkpoints").iterdir())) == 3


@pytest.mark.slow
async def test_signal_ends_after_the_step_and_the_rest_stays_in_the_stream(
    model: Path, tmp_path: Path
) -> None:
    async with embedded_valkey(tmp_path / "valkey") as redis_url, embedded_broker() as mqtt_url:
        link = RedisLink(redis_url)
        key = control.episodes_key("r")
        for index in range(5):
            record = small_record(
                f"e{index}", group_id=f"g{index // 2}", reward=float(index % 2), run="r"
            )
            await link.client.xadd(key, {control.RECORD_FIELD: record_to_bytes(record)})
        log = tmp_path / "trainer.log"
        process = await spawn(
            [*TRAINER, "--model.path", str(model), "--run", "r", "--run-folder", str(tmp_path),
             "--batch.groups-per-step", "1", "--batch.group-size", "2", "--lora.rank", "2"],
            log_path=log,
            environment={
                "OCTOPUS_REDIS_URL": redis_url,
                "OCTOPUS_MQTT_URL": mqtt_url,
                "OMP_NUM_THREADS": "1",
            },
        )  # fmt: skip
        try:
            async with asyncio.timeout(60):
                while "step 2:" not in log.read_text():
                    assert process.returncode is None, log.read_text()
                    await asyncio.sleep(0.1)
            process.send_signal(signal.SIGINT)
            assert await asyncio.wait_for(process.wait(), 15) == 0, log.read_text()
        finally:
            await stop(process, 0)
        pending = await link.client.xpending(key, "trainer")
        granted = await link.client.hget(control.permits_key("r"), "granted")
        await link.close()
    assert pending["pending"] == 1
    assert int(granted) == 2 + 2
    assert "trainer ends: version 2" in log.read_text()


async def test_second_signal_ends_at_once(model: Path, tmp_path: Path) -> None:
    write_records(tmp_path / "r.records", [small_record("a")])
    log = tmp_path / "trainer.log"
    process = await spawn(
        [*TRAINER, "--objective", "sft", "--model.path", str(model), "--run-folder",
         str(tmp_path), "--records", str(tmp_path / "r.records")],
        log_path=log,
    )  # fmt: skip
    try:
        async with asyncio.timeout(30):
            # Importing torch comes next: the first signal alone would have to wait for it.
            while "objective sft, in" not in log.read_text():
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            while "once more ends at once" not in log.read_text():
                await asyncio.sleep(0.02)
            process.send_signal(signal.SIGTERM)
            assert await process.wait() == 128 + signal.SIGTERM
    finally:
        await stop(process, 0)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("--model.path", "no/such/model"), "no model there; got no/such/model"),
        (("--model.path", "MODEL", "--batch.records", "no-file"), "directory; got no-file"),
        (("--model.path", "MODEL", "--run-folder", "FILE"), "check the path"),
        (("--model.path", "MODEL", "--redis.url", "http://h", "--objective", "dag_grpo"), "redis"),
    ],
)
def test_what_cannot_be_used_is_named_without_a_traceback(
    model: Path, tmp_path: Path, flags: tuple[str, ...], said: str
) -> None:
    file = tmp_path / "file"
    file.touch()
    named = [{"MODEL": model, "FILE": file}.get(flag, flag) for flag in flags]
    shown = _run("--objective", "sft", "--run-folder", tmp_path / "runs", *named, code=1)
    assert said in shown.stderr
    assert "Traceback" not in shown.stderr


def test_full_disk_ends_with_the_checkpoints_that_there_are(model: Path, tmp_path: Path) -> None:
    records = tmp_path / "records"
    write_records(records, [small_record(f"e{number}") for number in range(8)])
    flags = ["--objective", "sft", "--model.path", model, "--batch.records", records]
    words = [*TRAINER, *map(str, flags), "--run-folder", str(tmp_path / "runs")]
    # Files of at most 8 KiB: what a full disk does to the adapter, and would to coverage's data.
    environment = {k: v for k, v in os.environ.items() if not k.startswith("COVERAGE")}
    shown = subprocess.run(
        ["sh", "-c", f"ulimit -f 16; exec {shlex.join(words)}"],
        capture_output=True, text=True, timeout=120, check=False, env=environment,
    )  # fmt: skip
    assert shown.returncode == 1
    assert "checkpoint 1 cannot be written" in shown.stderr
    assert "Traceback" not in shown.stderr
    _run(*flags, "--run-folder", tmp_path / "runs")
    run = tmp_path / "runs" / "default"
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["00000001"]
    assert (run / "adapters" / "1" / control.ADAPTER_FILE).is_file()


def test_servers_that_are_not_there_are_named(model: Path, tmp_path: Path) -> None:
    shown = _run(
        "--model.path", model, "--run-folder", tmp_path,
        "--redis.url", f"redis://127.0.0.1:{free_port()}",
        "--mqtt.url", f"mqtt://127.0.0.1:{free_port()}",
        "--mqtt.patience-s", "0.3", "--redis.patience-s", "0.3",
        code=1,
    )  # fmt: skip
    assert "the MQTT broker cannot be reached" in shown.stderr
    assert "correct mqtt.url" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_reader_of_the_log_that_leaves_keeps_no_process(model: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable, "-m", "trainer_service", "--model.path", str(model),
            "--run-folder", str(tmp_path), "--redis.url", f"redis://127.0.0.1:{free_port()}",
            "--mqtt.url", f"mqtt://127.0.0.1:{free_port()}", "--mqtt.patience-s", "0.3",
        ],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    process.stderr.close()
    try:
        assert process.wait(60) != 0
    finally:
        process.kill()
