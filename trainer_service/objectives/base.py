"""What every objective takes and gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch

from trainer_service.strip import Strip


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PackedLogprobs:
    """The current policy on a strip's actions."""

    policy_logprobs: torch.Tensor
    """Of the tempered distribution, nats, `[A]` float32, differentiable."""
    entropy: torch.Tensor
    """Of the tempered distribution, nats, `[A]` float32, differentiable."""
    pieces_backward: Callable[[], None] | None = None
    """Of a strip in pieces, whose tensors are leaves: takes their gradients to the parameters."""

    def backward(self, loss: torch.Tensor) -> None:
        """Add to the parameters' gradients those of `loss`, a scalar computed from these."""
        loss.backward()
        if self.pieces_backward is not None:
            self.pieces_backward()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveOptions:
    """Settings that the objectives share."""

    clip_low: float = 0.2
    """Ratios below `1 - clip_low` gain nothing."""
    clip_high: float = 0.28
    """Ratios above `1 + clip_high` gain nothing."""
    old_logprobs: torch.Tensor | None = None
    """Denominator of the ratio, `[A]`; None takes the recorded sampling log-probabilities, or the
    current policy's own where `max_importance` corrects for the difference."""
    max_importance: float | None = None
    """Cap of the importance weight `exp(old_logprobs - sampled_logprobs)`; None leaves the weight
    out."""
    min_importance: float = 0.0
    """Floor of the weight, with `masks_importance`."""
    masks_importance: bool = False
    """Weights outside floor and cap become 0; otherwise those above the cap become the cap."""
    importance_level: Literal["token", "sequence", "geometric"] = "token"
    """Whose weight an action has: its own, its episode's, or its episode's geometric mean."""
    kl_coef: float = 0.0
    """Weight of KL(policy || reference) per action, by the k3 estimator; needs `ref_logprobs`."""
    ref_logprobs: torch.Tensor | None = None
    """The reference policy's, nats, `[A]`."""
    entropy_coef: float = 0.0
    """Weight of the entropy, which is to be large."""
    constant_length: float | None = None
    """What `dag_grpo` divides by in place of the episode's own number of actions."""
    path_weights: torch.Tensor | None = None
    """Weight of each path, `[P]`, for `path_average`; None weighs the K paths of an episode
    1/K each."""
    num_episodes: int | None = None
    """Episodes of the whole optimiser step, all strips and ranks; None counts the strip's."""
    num_actions: int | None = None
    """Actions of the whole optimiser step, for `sft`; None counts the strip's."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ObjectiveOutput:
    """A loss and what to report of it."""

    loss: torch.Tensor
    """Scalar, to be minimised; 0 with a gradient of 0 where no action counts."""
    metrics: dict[str, float] = field(default_factory=dict)


class Objective(Protocol):
    """One objective; advantages are per episode, `[E]`."""

    def __call__(
        self,
        logprobs: PackedLogprobs,
        strip: Strip,
        advantages: torch.Tensor,
        options: ObjectiveOptions,
    ) -> ObjectiveOutput: ...
