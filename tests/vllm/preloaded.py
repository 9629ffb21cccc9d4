"""What an engine process imports, once for all of them: they are forked off the process that did.

Without it each imports vLLM anew, which takes ten times as long as the rest of its start.
"""

from __future__ import annotations

import importlib
import multiprocessing
from typing import Any

_MODULES = (
    "tests.vllm.audited_scheduler",
    "rollout_service.engine.vllm.worker",
    "vllm.v1.worker.cpu_worker",
    *(
        f"vllm.model_executor.models.{name}"
        for name in ("granitemoehybrid", "llama", "qwen3", "qwen3_5", "qwen3_moe", "qwen3_next")
    ),
)


def fork_engines() -> None:
    """Let vLLM start its processes from a server that has imported all of this.

    What they start themselves, such as ranks, is spawned as ever.
    """
    multiprocessing.set_forkserver_preload([*_MODULES])
    # Read where a process is started; the environment, which they inherit, allows no such value.
    environment: Any = importlib.import_module("vllm.envs")
    environment.VLLM_WORKER_MULTIPROC_METHOD = "forkserver"
