"""The demo's figures, computed from the steps that the trainer reported, and its targets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any

MIN_REWARD_LAST = 0.8
MIN_REWARD_GAIN = 0.3
MAX_KL = 1e-8


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What `octopus demo --json` writes."""

    reward_first_quarter: float
    """Mean over the first quarter of the RL steps."""
    reward_last_quarter: float
    kl_max: float
    """Largest KL(rollout || trainer) per sampled token of an RL step, in nats."""
    tokens_packed: int
    """Computed by the trainer in both phases."""
    tokens_flat: int
    """What the same episodes are path by path."""
    adapter_versions_served: int
    """Versions that the replica acknowledged and its checksums proved."""
    rollout_restarts: int
    rl_steps: int
    seconds: float
    """Of the whole demo, start and end of the services included."""
    engine: str

    @classmethod
    def of(
        cls, steps: Sequence[Mapping[str, Any]], *, restarts: int, seconds: float, engine: str
    ) -> Figures:
        """Figures of `steps`, the lines of metrics.jsonl.

        Raises:
            ValueError: There is no RL step.
        """
        online = [step for step in steps if step["objective"] != "sft"]
        if not online:
            raise ValueError("no RL step among the trainer's metrics")
        rewards = [step["reward/mean"] for step in online]
        quarter = max(len(rewards) // 4, 1)
        served = {s["policy/version"] for s in steps if s.get("publish/acknowledged", 0) >= 1}
        return cls(
            reward_first_quarter=fmean(rewards[:quarter]),
            reward_last_quarter=fmean(rewards[-quarter:]),
            kl_max=max(step["divergence/kl_mean"] for step in online),
            tokens_packed=sum(int(step["tokens/packed"]) for step in steps),
            tokens_flat=sum(int(step["tokens/flat"]) for step in steps),
            adapter_versions_served=len(served),
            rollout_restarts=restarts,
            rl_steps=len(online),
            seconds=round(seconds, 1),
            engine=engine,
        )

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    def missed(self) -> list[str]:
        """The targets that were not met, one sentence each."""
        gain = self.reward_last_quarter - self.reward_first_quarter
        checks = (
            (
                self.reward_last_quarter >= MIN_REWARD_LAST,
                f"reward of the last quarter {self.reward_last_quarter:.3f}, "
                f"wanted at least {MIN_REWARD_LAST:g}",
            ),
            (
                gain >= MIN_REWARD_GAIN,
                f"reward rose by {gain:.3f}, wanted at least {MIN_REWARD_GAIN:g}",
            ),
            (self.kl_max < MAX_KL, f"largest KL {self.kl_max:.2e}, wanted below {MAX_KL:g}"),
        )
        return [text for met, text in checks if not met]

    def rows(self) -> list[tuple[str, str]]:
        """For people: name and value."""
        packed = self.tokens_packed / max(self.tokens_flat, 1)
        return [
            ("mean reward, first quarter of RL", f"{self.reward_first_quarter:.3f}"),
            ("mean reward, last quarter of RL", f"{self.reward_last_quarter:.3f}"),
            ("largest KL(rollout || trainer) per token", f"{self.kl_max:.2e}"),
            (
                "tokens packed / flat",
                f"{self.tokens_packed:,} / {self.tokens_flat:,} = {packed:.3f}",
            ),
            ("LoRA versions served", str(self.adapter_versions_served)),
            ("rollout restarts", str(self.rollout_restarts)),
            ("RL steps", str(self.rl_steps)),
            ("seconds", f"{self.seconds:.0f}"),
            ("engine", self.engine),
        ]
