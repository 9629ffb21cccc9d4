"""How large the benchmarks are on each device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """An agent-shaped load: Octopus section 4.2, lengths divided by `divisor`."""

    num_episodes: int
    num_branches: int
    num_turns: int
    """Turns of a branch before rewinds; even."""
    divisor: int
    concurrency: int
    """Episodes that clients hold open at a time."""
    timeout_s: float
    """From an episode's admission to its end; past it the episode counts as timed out."""

    @property
    def observation_tokens(self) -> tuple[int, int]:
        """A search (512 tokens a hit, 8 hits) and an opened page (8,000 tokens), in turns.

        Where a branch takes fewer turns than the paper's, each brings as much more.
        """
        more = 4 / max(self.num_turns - 1, 1)
        return round(4096 * more / self.divisor), round(8000 * more / self.divisor)

    @property
    def thread_budget(self) -> int:
        """32,768 tokens and as many for notes, which do not shrink with the rest."""
        return max(2 * 32_768 // self.divisor, 1024)

    @property
    def turn_tokens(self) -> int:
        """19,251 generated tokens an episode, shared among its turns."""
        num_turns = self.num_branches * self.num_turns * 1.3 + 2
        return max(round(19_251 / self.divisor / num_turns), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """The sizes of one device's run."""

    device: str
    dtype: str
    model: str
    """Name of a shape in `shapes`."""
    contexts: tuple[int, ...]
    num_samples: int
    mount_tokens: int
    engine: dict[str, Any]
    """Arguments of `VllmEngine`."""
    vllm: dict[str, Any]
    """Arguments of vLLM itself, for this engine and for the plain one."""
    pool_bytes: dict[str, int]
    """KV pool of this engine and the plain one alike, and of the one for the admission."""
    admission_blocks: int
    load: Load
    admission: Load
    decode: tuple[int, int, int]
    """Sequences, tokens of context, tokens sampled."""
    num_checkpoints: int
    num_decoding: int
    lora_rank: int

    @property
    def full_context(self) -> int:
        """The longest context."""
        return self.contexts[-1]


_GIB = 1 << 30

CPU = Scale(
    device="cpu",
    dtype="bfloat16",
    model="tiny_hybrid",
    contexts=(1024, 2048, 4096, 8192),
    num_samples=30,
    mount_tokens=2048,
    engine={"max_num_seqs": 16, "max_states": 128},
    vllm={"load_format": "dummy", "max_model_len": 10_240, "max_num_batched_tokens": 2048},
    pool_bytes={"main": _GIB // 2, "admission": _GIB // 4},
    admission_blocks=400,
    load=Load(
        num_episodes=3, num_branches=3, num_turns=3, divisor=64, concurrency=2, timeout_s=300
    ),
    admission=Load(
        num_episodes=200, num_branches=2, num_turns=2, divisor=256, concurrency=32, timeout_s=120
    ),
    decode=(8, 128, 96),
    num_checkpoints=60,
    num_decoding=16,
    lora_rank=8,
)

CUDA = Scale(
    device="cuda",
    dtype="bfloat16",
    model="qwen3_5_4b",
    contexts=(1024, 8192, 32_768, 131_072),
    num_samples=200,
    mount_tokens=32_768,
    engine={"max_num_seqs": 256, "max_states": 2048},
    vllm={
        "load_format": "dummy",
        "max_model_len": 140_000,
        "max_num_batched_tokens": 8192,
        "attention_backend": "FLASH_ATTN",
        "gdn_prefill_backend": "triton",
        # No inductor: a cold start then takes one minute instead of three, for both engines.
        "compilation_config": {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64, 96, 128, 160, 192, 224, 256],
        },
    },
    pool_bytes={"main": 104 * _GIB, "admission": 18 * _GIB},
    admission_blocks=1100,
    load=Load(
        num_episodes=64, num_branches=10, num_turns=5, divisor=8, concurrency=64, timeout_s=600
    ),
    admission=Load(
        num_episodes=1000, num_branches=6, num_turns=2, divisor=64, concurrency=128, timeout_s=60
    ),
    decode=(128, 1024, 128),
    num_checkpoints=1000,
    num_decoding=256,
    lora_rank=64,
)

SCALES = {"cpu": CPU, "cuda": CUDA}
