"""LoRA adapters in PEFT's form: where they sit, their tensors, their checksums."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MethodType
from typing import Any

import peft
import torch
import torch.nn.functional as F
from peft.tuners.lora import Linear as LoraLinear
from safetensors.torch import save_file
from torch import nn

from harness_sdk.errors import AdapterError, ConfigError

_NARROW = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraOptions:
    """Size and place of the adapter."""

    rank: int = 16
    alpha: float = 32.0
    """The adapter's output is scaled by `alpha / rank`."""
    target_modules: tuple[str, ...] = ()
    """Names of the linear layers; empty takes the architecture's own."""
    seed: int = 0
    """Of the initial A matrices; B starts at zero, so version 0 equals the base model."""


def add_adapter(
    model: Any, options: LoraOptions, targets: tuple[str, ...], adapter_path: str | Path | None
) -> peft.PeftModel:
    """Wrap `model` with a new adapter, or with the one stored at `adapter_path`.

    Raises:
        AdapterError: The stored adapter has another rank, scale or set of modules, or misses
            tensors.
        ConfigError: The model has none of the modules.
    """
    config = peft.LoraConfig(
        r=options.rank,
        lora_alpha=options.alpha,  # pyright: ignore[reportArgumentType] - any number works
        lora_dropout=0.0,
        target_modules=list(targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
    missing = set(targets) - {name.rpartition(".")[2] for name, _ in model.named_modules()}
    if missing:
        raise ConfigError(
            "LoRA targets that the model does not have",
            value=", ".join(sorted(missing)),
            limit=", ".join(sorted(_linear_names(model))),
            remedy="correct lora.targets",
        )
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        # PEFT 0.21 reads a property that transformers 5.24 renamed.
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        torch.manual_seed(options.seed)
        wrapped = peft.get_peft_model(model, config)
    if not isinstance(wrapped, peft.PeftModel):
        raise TypeError(f"PEFT returned {type(wrapped).__name__}")
    if adapter_path is not None:
        _restore(wrapped, config, Path(adapter_path))
    return wrapped


def _linear_names(model: Any) -> set[str]:
    linear = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name.rpartition(".")[2] for name in linear}


def multiply_in_model_type(model: peft.PeftModel) -> None:
    """Let float32 adapters of a 16-bit model multiply in its type, as serving engines do.

    Parameters and their gradients stay float32. PEFT copies each layer's input to float32: at rank
    64 that costs as much time as the frozen product beside it. Other models stay as PEFT has them.
    """
    for module in model.modules():
        if isinstance(module, LoraLinear) and module.base_layer.weight.dtype in _NARROW:
            module.forward = MethodType(_narrow_forward, module)


def _narrow_forward(self: Any, x: torch.Tensor) -> torch.Tensor:
    base, (down, up) = self.base_layer, (p["default"].weight for p in (self.lora_A, self.lora_B))
    return _LoraProduct.apply(x, base.weight, base.bias, down, up, self.scaling["default"])


class _LoraProduct(torch.autograd.Function):
    """`x W^T + scaling (x A^T) B^T`; forward and backward add the adapter's part where it stands.

    W and the bias are frozen. A and B are multiplied in the type of x.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        down: torch.Tensor,
        up: torch.Tensor,
        scaling: float,
    ) -> torch.Tensor:
        rows = x.flatten(0, -2)
        low = rows @ down.to(x.dtype).t()
        out = F.linear(rows, weight, bias)
        out.addmm_(low, up.to(x.dtype).t(), alpha=scaling)
        ctx.save_for_backward(x, low, weight, down, up)
        ctx.scaling = scaling
        return out.unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, low, weight, down, up = ctx.saved_tensors
        grad = grads[0].flatten(0, -2)
        grad_low = (grad @ up.to(x.dtype)).mul_(ctx.scaling)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (grad @ weight).addmm_(grad_low, down.to(x.dtype)).view_as(x)
        grad_down = (grad_low.t() @ x.flatten(0, -2)).to(down.dtype)
        grad_up = (grad.t() @ low).to(up.dtype).mul_(ctx.scaling)
        return grad_x, None, None, grad_down, grad_up, None


def adapter_tensors(model: peft.PeftModel) -> dict[str, torch.Tensor]:
    """The adapter's tensors by the names that PEFT's files use."""
    return dict(peft.get_peft_model_state_dict(model))


def save_adapter(model: peft.PeftModel, folder: str | Path) -> None:
    """Write `adapter_config.json` and `adapter_model.safetensors` in float32."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    config = model.peft_config["default"]
    config.save_pretrained(str(target))
    tensors = {name: _stored_form(value) for name, value in adapter_tensors(model).items()}
    save_file(tensors, target / "adapter_model.safetensors", metadata={"format": "pt"})


def tensor_checksums(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """sha256 of each tensor's little-endian float32 bytes in C order, by name."""
    return {
        name: hashlib.sha256(_stored_form(value).numpy().astype("<f4").tobytes()).hexdigest()
        for name, value in tensors.items()
    }


def _stored_form(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", torch.float32).contiguous()


def _restore(model: peft.PeftModel, config: peft.LoraConfig, folder: Path) -> None:
    stored: Any = peft.LoraConfig.from_pretrained(str(folder))
    wanted = (config.r, config.lora_alpha, sorted(config.target_modules or ()))
    found = (stored.r, stored.lora_alpha, sorted(stored.target_modules or ()))
    if wanted != found:
        raise AdapterError(
            "the stored adapter is another one",
            value=f"rank, alpha, modules {found}",
            limit=str(wanted),
            remedy="resume with the model and options that it was trained with, or name a new run",
        )
    tensors = peft.load_peft_weights(str(folder), device="cpu")
    expected = adapter_tensors(model)
    wrong = sorted(
        name
        for name in tensors.keys() | expected.keys()
        if name not in tensors
        or name not in expected
        or tensors[name].shape != expected[name].shape
    )
    if wrong:
        raise AdapterError(
            "the stored adapter does not fit the model",
            value=", ".join(wrong[:5]),
            limit=f"{len(expected)} tensors",
            remedy="resume with the model that it was trained on, or name a new run",
        )
    peft.set_peft_model_state_dict(model, tensors)
