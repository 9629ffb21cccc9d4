"""Engines under test, models whose answers depend on every visible token, adapters for them."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from harness_sdk.types import SamplingOptions
from rollout_service.cursors import Cursor, Mount
from rollout_service.engine.base import Engine, Generated, SampledToken
from tests.reference import Reference
from tests.tiny_models import LORA_TARGETS, tiny_model

VOCAB = 300
# Fresh weights answer almost alike whatever they read; times 4, one token of a hundred moves
# log-probabilities by 0.01 to 1 nat, while stock forwards still agree among themselves to 5e-6
# (at 8 times they differ by 1e-4).
_SHARPEN = 4.0


def detokenize(token_ids: Sequence[int]) -> str:
    """A stand-in tokenizer: one letter a token."""
    return "".join(chr(ord("a") + token % 26) for token in token_ids)


def transformers_engine(path: Path, **options: Any) -> Engine:
    """The transformers engine in float32 on the CPU."""
    from rollout_service.engine.transformers import TransformersEngine

    return TransformersEngine(str(path), detokenize=detokenize, **options)


def vllm_engine(path: Path, **options: Any) -> Engine:
    """The vLLM engine on the CPU; it takes long to start, so tests share one."""
    from rollout_service.engine.vllm import VllmEngine

    chosen: dict[str, Any] = {
        "max_tokens": 8192,
        "max_states": 64,
        "max_num_seqs": 16,
        "detokenize": detokenize,
    }
    return VllmEngine(str(path), page_tokens=VLLM_PAGE, **(chosen | options))


VLLM_PAGE = 32
"""Tokens per page: the fewest that vLLM's CPU kernels like."""

MakeEngine = Callable[..., Engine]

ENGINES: dict[str, MakeEngine] = {"transformers": transformers_engine, "vllm": vllm_engine}
"""Engines that must conform; called with a model folder and `max_tokens`, `max_num_seqs`.

tests/service plays the suite with the first, on models of odd sizes; tests/vllm with the second,
on models that vLLM's CPU kernels take.
"""


@cache
def sharp_model(family: str) -> Any:
    """A tiny model in memory; one per process, so never change it."""
    import torch

    model = tiny_model(family, vocab_size=VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(_SHARPEN)
    return model


def save_adapter(folder: Path, base: Path, family: str, *, seed: int = 1, rank: int = 4) -> Any:
    """A random adapter in `folder`, written by PEFT; returns the adapted model."""
    import torch
    from peft import LoraConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = LoraConfig(
        r=rank,
        lora_alpha=2 * rank,
        target_modules=LORA_TARGETS[family],
        init_lora_weights=False,
    )
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(str(base)), config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.3)
    model.save_pretrained(str(folder))
    return model


@dataclass(kw_only=True)
class Play:
    """An engine and its oracle, with shorter calls."""

    engine: Engine
    reference: Reference
    rng: random.Random
    version: int = 0
    family: str = ""
    folder: Path = Path()
    """Of the model that the engine serves."""

    def expected(self, **counts: Any) -> Any:
        """What this engine is expected to count, of what each is."""
        return counts[self.engine.info.name]

    def tokens(self, count: int) -> tuple[int, ...]:
        """Random token ids."""
        return tuple(self.rng.randrange(VOCAB) for _ in range(count))

    async def extend(
        self, parent: Cursor | None, count: int | Sequence[int], *mounts: Mount
    ) -> Cursor:
        """Append tokens, scored; mounts come beside the parent's."""
        tokens = self.tokens(count) if isinstance(count, int) else tuple(count)
        inherited = parent.mounts if parent is not None else ()
        return await self.engine.extend(
            parent,
            tokens,
            mounts=inherited + mounts,
            policy_version=self.version,
            score_from=0 if parent is not None else 1,
        )

    async def turn(self, parent: Cursor, max_tokens: int, **options: Any) -> Cursor:
        """Sample a turn after a three-token generation prompt."""
        return (await self.sample(parent, max_tokens, **options)).cursor

    async def sample(
        self,
        parent: Cursor,
        max_tokens: int,
        *,
        prompt: Sequence[int] = (5, 6, 7),
        stop_token_ids: frozenset[int] = frozenset(),
        version: int | None = None,
        **options: Any,
    ) -> Generated:
        """Sample a turn; checks the stream against its end."""
        sampled: list[SampledToken] = []
        async for item in self.engine.generate(
            parent,
            prompt,
            SamplingOptions(max_tokens=max_tokens, **options),
            stop_token_ids=stop_token_ids,
            policy_version=self.version if version is None else version,
        ):
            if isinstance(item, Generated):
                cursor = item.cursor
                assert cursor.token_ids == (*prompt, *(token.token_id for token in sampled))
                assert cursor.sampled_logprobs == tuple(token.logprob for token in sampled)
                assert cursor.sampled == (False,) * len(prompt) + (True,) * len(sampled)
                return item
            sampled.append(item)
        raise AssertionError("the stream ended without its cursor")

    def check(self, *cursors: Cursor, tolerance: float = 2e-5) -> None:
        """Sampled log-probabilities must equal the oracle's."""
        for cursor in cursors:
            expected = self.reference.token_logprobs(cursor)
            scored = cursor.sampled_logprobs
            assert scored, "nothing to compare"
            worst = max(abs(a - b) for a, b in zip(expected[-len(scored) :], scored, strict=True))
            assert worst <= tolerance, f"{worst} nats from the oracle"


def span(source: Cursor, begin: int = 0, end: int | None = None) -> Mount:
    """A mount of the source's tokens `[begin, end)`."""
    return Mount(source=source, begin=begin, end=len(source.token_ids) if end is None else end)
