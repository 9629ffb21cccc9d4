"""Optimiser steps: schedule, clipping, skipped ones, state."""

from __future__ import annotations

import math

import pytest
import torch

from harness_sdk.errors import ConfigError
from trainer_service.optim import Optimizer, lr_factor
from trainer_service.sections import OptimOptions


def _parameter() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.tensor([1.0, -2.0, 3.0]))


def test_warmup_ramps_to_the_whole_rate() -> None:
    options = OptimOptions(warmup_steps=4)
    assert [lr_factor(step, options) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_schedule_ends_at_its_floor(schedule: str) -> None:
    options = OptimOptions.model_validate(
        {"schedule": schedule, "warmup_steps": 2, "decay_steps": 10, "min_lr_factor": 0.1}
    )
    factors = [lr_factor(step, options) for step in range(2, 14)]
    assert factors[0] == 1.0
    assert factors == sorted(factors, reverse=True)
    assert math.isclose(lr_factor(6, options), 0.55)
    assert all(math.isclose(factor, 0.1) for factor in factors[8:])


def test_step_is_that_of_adamw_with_clipped_gradients() -> None:
    options = OptimOptions(lr=0.1, max_grad_norm=1.0, weight_decay=0.01)
    ours, theirs = _parameter(), _parameter()
    optimizer = Optimizer([ours], options)
    reference = torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.01)
    for grad in ([3.0, 4.0, 0.0], [0.1, 0.2, 0.2]):
        ours.grad = torch.tensor(grad)
        outcome = optimizer.step(loss=1.0)
        theirs.grad = torch.tensor(grad) / max(1.0, outcome.grad_norm)
        reference.step()
        assert outcome.grad_norm == pytest.approx(math.hypot(*grad))
        assert torch.allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize(("grad", "loss"), [(math.nan, 1.0), (math.inf, 1.0), (1.0, math.nan)])
def test_non_finite_step_is_skipped_and_counted(grad: float, loss: float) -> None:
    parameter = _parameter()
    optimizer = Optimizer([parameter], OptimOptions(lr=0.1))
    parameter.grad = torch.full((3,), grad)
    before = parameter.detach().clone()
    outcome = optimizer.step(loss=loss)
    assert outcome.skipped
    assert torch.equal(parameter, before)
    assert (optimizer.num_steps, optimizer.num_skipped, optimizer.skipped_in_a_row) == (0, 1, 1)
    assert parameter.grad is None
    parameter.grad = torch.ones(3)
    assert not optimizer.step(loss=1.0).skipped
    assert (optimizer.num_steps, optimizer.num_skipped, optimizer.skipped_in_a_row) == (1, 1, 0)
    assert optimizer.num_attempts == 2


def test_scaled_loss_makes_the_same_step() -> None:
    stepped = []
    for scales_loss in (False, True):
        parameter = _parameter()
        optimizer = Optimizer([parameter], OptimOptions(lr=0.1), scales_loss=scales_loss)
        loss = (parameter * torch.tensor([0.1, 0.2, -0.3])).sum()
        optimizer.scaled(loss).backward()
        assert parameter.grad is not None
        assert float(parameter.grad[0]) == pytest.approx(0.1 * optimizer.loss_scale)
        outcome = optimizer.step(loss=float(loss.detach()))
        stepped.append((outcome, parameter.detach().clone(), optimizer.loss_scale))
    (one, plain, no_scale), (other, scaled, scale) = stepped
    assert one == other
    assert torch.equal(plain, scaled)
    assert (no_scale, scale) == (1.0, 65536.0)


def test_overflow_halves_the_scale_and_counts_as_no_step_also_on_resuming() -> None:
    parameter = _parameter()
    before = parameter.detach().clone()
    optimizer = Optimizer([parameter], OptimOptions(lr=0.1), scales_loss=True)
    # A step that taught nothing, before any loss was scaled.
    parameter.grad = torch.zeros(3)
    assert not optimizer.step(loss=0.0).skipped
    parameter.grad = torch.tensor([1.0, torch.inf, 1.0])
    outcome = optimizer.step(loss=1.0)
    assert outcome.skipped and outcome.overflowed
    assert torch.equal(parameter, before)
    assert (optimizer.num_attempts, optimizer.loss_scale) == (1, 32768.0)
    # A loss that is not finite says nothing of the scale.
    parameter.grad = torch.ones(3)
    outcome = optimizer.step(loss=math.nan)
    assert outcome.skipped and not outcome.overflowed
    assert (optimizer.num_skipped, optimizer.loss_scale) == (1, 32768.0)
    resumed = Optimizer([_parameter()], OptimOptions(lr=0.1), scales_loss=True)
    resumed.load_state_dict(optimizer.state_dict())
    # The scale, and how long it has been right.
    assert resumed.state_dict()["scaler"] == optimizer.state_dict()["scaler"]
    assert resumed.loss_scale == 32768.0
    resumed.parameters[0].grad = torch.full((3,), 32768.0)
    assert resumed.step(loss=1.0).grad_norm == pytest.approx(math.sqrt(3))


def test_a_gradient_that_is_finite_at_no_scale_is_skipped_in_the_end() -> None:
    parameter = _parameter()
    optimizer = Optimizer([parameter], OptimOptions(lr=0.1), scales_loss=True)
    for num_skipped in (1, 2):
        overflowed = True
        num_tries = 0
        while overflowed:
            parameter.grad = torch.full((3,), torch.nan)
            overflowed = optimizer.step(loss=1.0).overflowed
            num_tries += 1
        assert num_tries == 9
        assert optimizer.num_skipped == optimizer.skipped_in_a_row == num_skipped
        # Half for each, as of any step that GradScaler skips.
        assert optimizer.loss_scale == 65536.0 / 2**num_skipped
    parameter.grad = torch.full((3,), optimizer.loss_scale)
    assert optimizer.step(loss=1.0).grad_norm == pytest.approx(math.sqrt(3))


@pytest.mark.parametrize("before", [False, True])
def test_state_goes_from_one_dtype_to_another(before: bool) -> None:
    first = Optimizer([_parameter()], OptimOptions(), scales_loss=before)
    second = Optimizer([_parameter()], OptimOptions(), scales_loss=not before)
    second.load_state_dict(first.state_dict())
    second.parameters[0].grad = torch.ones(3)
    assert not second.step(loss=1.0).skipped
    assert second.loss_scale == (1.0 if before else 65536.0)


def test_state_continues_bit_for_bit() -> None:
    options = OptimOptions.model_validate(
        {"lr": 0.1, "schedule": "cosine", "decay_steps": 6, "warmup_steps": 2}
    )
    whole = _parameter()
    optimizer = Optimizer([whole], options)
    state, middle = {}, whole.detach().clone()
    for step in range(6):
        whole.grad = torch.sin(torch.arange(3.0) + step)
        optimizer.step(loss=1.0)
        if step == 2:
            state, middle = optimizer.state_dict(), whole.detach().clone()
            state = {**state, "adamw": torch_copy(state["adamw"])}
    resumed = torch.nn.Parameter(middle)
    second = Optimizer([resumed], options)
    second.load_state_dict(state)
    for step in range(3, 6):
        resumed.grad = torch.sin(torch.arange(3.0) + step)
        second.step(loss=1.0)
    assert torch.equal(resumed, whole)


def test_resumed_run_follows_its_own_options() -> None:
    before = Optimizer([_parameter()], OptimOptions(lr=0.1))
    before.parameters[0].grad = torch.ones(3)
    before.step(loss=1.0)
    ours, theirs = _parameter(), _parameter()
    resumed = Optimizer([ours], OptimOptions(lr=0.1, beta1=0.5, eps=1e-3, weight_decay=0.5))
    state = before.state_dict()
    resumed.load_state_dict({**state, "adamw": torch_copy(state["adamw"])})
    reference = torch.optim.AdamW([theirs], lr=0.1)
    reference.load_state_dict(torch_copy(before.state_dict()["adamw"]))
    reference.param_groups[0].update(betas=(0.5, 0.999), eps=1e-3, weight_decay=0.5)
    ours.grad, theirs.grad = torch.full((3,), 0.1), torch.full((3,), 0.1)
    resumed.step(loss=1.0)
    reference.step()
    assert torch.allclose(ours, theirs, atol=1e-6)


def test_optimizer_without_parameters_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora\.targets"):
        Optimizer([], OptimOptions())


def torch_copy(state: dict) -> dict:
    """A deep copy through torch's own format, as the checkpoint makes one."""
    import io

    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)
