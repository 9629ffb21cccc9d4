"""Two processes on a GPU each, gradients through NCCL, beside one process on one GPU; then with the
base weights divided between them, and with strips in pieces too."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from harness_sdk.control import ADAPTER_FILE
from harness_sdk.records_file import write_records
from tests.random_records import random_record
from tests.tiny_models import save_tiny_model
from tests.trainer_ranks import run_ranks
from tests.trainer_runs import run_config
from trainer_service.config import TrainerConfig
from trainer_service.metrics import read_metrics

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen3_5")


def _config(
    folder: Path, model: Path, run: str, piece: int | None, sharding: str = "none"
) -> TrainerConfig:
    records = folder / "r.records"
    if not records.exists():
        write_records(
            records,
            [
                random_record(
                    np.random.default_rng(index), 300, num_events=6 + index, mount_layers=(2, 5)
                )
                for index in range(8)
            ],
        )
    return run_config(
        folder, model, run,
        objective="sft",
        ranks={"sharding": sharding},
        max_steps=2,
        batch={"records": records, "episodes_per_step": 4, "max_piece_tokens": piece},
        # Adam's first steps are the gradient's sign: plain noise where it is nearly 0.
        optim={"lr": 1e-3, "eps": 1e-2, "schedule": "cosine", "warmup_steps": 1, "decay_steps": 4},
    ).on_device("cuda")  # fmt: skip


@pytest.mark.parametrize(("sharding", "piece"), [("none", None), ("fsdp", None), ("fsdp", 40)])
async def test_two_gpus_make_the_steps_of_one(
    tmp_path: Path, model: Path, sharding: str, piece: int | None
) -> None:
    alone = _config(tmp_path, model, "alone", piece)
    together = _config(tmp_path, model, "together", piece, sharding)
    for config, count in ((alone, 1), (together, 2)):
        code, output = await run_ranks(config, count)
        assert code == 0, output
    one, two = (read_metrics(c.folder / "metrics.jsonl") for c in (alone, together))
    assert [line["ranks/size"] for line in two] == [2.0, 2.0]
    for a, b in zip(one, two, strict=True):
        for name in ("loss/total", "optim/grad_norm", "divergence/kl_mean"):
            assert b[name] == pytest.approx(a[name], rel=1e-5), name
    wanted, found = (
        load_file(c.folder / "adapters" / "2" / ADAPTER_FILE) for c in (alone, together)
    )
    for name, tensor in wanted.items():
        assert float((found[name] - tensor).abs().max()) <= 1e-6
