"""One optimiser step: AdamW, a schedule with warm-up, clipping; non-finite steps are skipped.

Gradients that pass through float16 would vanish below 6e-8: the loss they start from is scaled.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from harness_sdk.errors import ConfigError
from trainer_service.sections import OptimOptions

_MAX_HALVED = 8
"""Times that a step is computed again with half the scale. One that is finite at none of them is
skipped and leaves half the scale it began with, as `GradScaler` users know it from any skipped
step: not a 512th, where gradients of later steps would vanish, and not the whole, from which a run
that needs far less would never come down to it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """What one call of `Optimizer.step` did."""

    grad_norm: float
    """L2 over all parameters, before clipping."""
    lr: float
    skipped: bool
    """A loss or gradient was not finite: parameters, moments and schedule stand as before."""
    overflowed: bool = False
    """It may be the scale's fault, which is half of what it was: the same step is computed again,
    and counts as none so far."""


class Optimizer:
    """AdamW over the adapter's parameters.

    Args:
        parameters: The trainable ones, in an order that stays the same across restarts.
        options: Learning rate, schedule, clipping.
        scales_loss: Whether gradients pass through float16.
    """

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        options: OptimOptions,
        *,
        scales_loss: bool = False,
    ) -> None:
        self.parameters = list(parameters)
        if not self.parameters:
            raise ConfigError(
                "the adapter has no trainable parameters", remedy="check lora.targets"
            )
        self._options = options
        self._adamw = torch.optim.AdamW(
            self.parameters,
            lr=options.lr,
            betas=(options.beta1, options.beta2),
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        device = self.parameters[0].device
        # From 65,536: halved where gradients are not finite, doubled after 2,000 steps that were.
        self._scaler = torch.amp.GradScaler(device.type, enabled=scales_loss)
        # Its first use readies it, which a rank without episodes would not come to.
        self.scaled(torch.zeros((), device=device))
        self.num_steps = 0
        self.num_skipped = 0
        """Since the start of the run."""
        self.skipped_in_a_row = 0
        self._num_halved = 0
        """For the step in progress."""

    @property
    def num_attempts(self) -> int:
        """Steps and skipped steps since the start of the run: the number of what is reported."""
        return self.num_steps + self.num_skipped

    @property
    def lr(self) -> float:
        """Learning rate of the next step."""
        return self._options.lr * lr_factor(self.num_steps, self._options)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._adamw.zero_grad(set_to_none=True)

    @property
    def loss_scale(self) -> float:
        """What `scaled` multiplies by; 1.0 where nothing passes through float16."""
        return self._scaler.get_scale()

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """What to call `backward` of in place of `loss`; `step` divides the gradients again."""
        return self._scaler.scale(loss)

    def step(self, *, loss: float) -> StepOutcome:
        """Apply the accumulated gradients, unless they or `loss`, unscaled, are not finite.

        Where the outcome says `overflowed`, compute the gradients again and call it once more.
        """
        self._scaler.unscale_(self._adamw)
        grads = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        norm_tensor = torch.nn.utils.get_total_norm(grads)
        norm, lr = float(norm_tensor), self.lr
        if not (math.isfinite(norm) and math.isfinite(loss)):
            overflowed = (
                self._scaler.is_enabled() and math.isfinite(loss) and self._num_halved < _MAX_HALVED
            )
            began_at = self.loss_scale * 2**self._num_halved
            self._scaler.update()
            self.zero_grad()
            if overflowed:
                self._num_halved += 1
            else:
                if self._num_halved:
                    self._scaler.update(began_at / 2)
                self.num_skipped += 1
                self.skipped_in_a_row += 1
                self._num_halved = 0
            return StepOutcome(grad_norm=norm, lr=lr, skipped=True, overflowed=overflowed)
        torch.nn.utils.clip_grads_with_norm_(
            self.parameters, self._options.max_grad_norm, norm_tensor
        )
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._scaler.step(self._adamw)
        self._scaler.update()
        self.zero_grad()
        self.num_steps += 1
        self.skipped_in_a_row = self._num_halved = 0
        return StepOutcome(grad_norm=norm, lr=lr, skipped=False)

    def state_dict(self) -> dict[str, Any]:
        """Moments and counters, for the checkpoint."""
        return {
            "adamw": self._adamw.state_dict(),
            "scaler": self._scaler.state_dict(),
            "num_steps": self.num_steps,
            "num_skipped": self.num_skipped,
            "skipped_in_a_row": self.skipped_in_a_row,
        }

    def load_state_dict(self, state: dict[str, Any], *, moments: bool = True) -> None:
        """Take up where `state` left off; without its moments where another loss made them.

        The options stay this run's own: PyTorch keeps them in the state as well.
        """
        if moments:
            own = [
                {name: group[name] for name in ("betas", "eps", "weight_decay")}
                for group in self._adamw.param_groups
            ]
            self._adamw.load_state_dict(state["adamw"])
            for group, options in zip(self._adamw.param_groups, own, strict=True):
                group.update(options)
        # A run that was trained in another dtype has none.
        if state.get("scaler"):
            self._scaler.load_state_dict(state["scaler"])
        self.num_steps = state["num_steps"]
        self.num_skipped = state["num_skipped"]
        self.skipped_in_a_row = state["skipped_in_a_row"]


def lr_factor(step: int, options: OptimOptions) -> float:
    """Multiple of the learning rate at `step`, from 0: a ramp, then the schedule.

    Example:
        Warm-up over 4 steps gives 0.25, 0.5, 0.75, 1.0 and then the schedule's values.
    """
    if step < options.warmup_steps:
        return (step + 1) / options.warmup_steps
    if options.schedule == "constant":
        return 1.0
    assert options.decay_steps is not None
    span = max(options.decay_steps - options.warmup_steps, 1)
    done = min((step - options.warmup_steps) / span, 1.0)
    shape = 1.0 - done if options.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return options.min_lr_factor + (1.0 - options.min_lr_factor) * shape
