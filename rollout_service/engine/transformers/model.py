"""A Hugging Face model that computes strips: attention and recurrent mixers replaced per instance.

Owns the loaded weights; knows nothing of requests or residency.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from harness_sdk.errors import ConfigError
from rollout_service.cursors import Cursor
from rollout_service.engine.head import head_logits
from rollout_service.engine.mount_layers import choose_mount_layers
from rollout_service.engine.transformers.mixers import MIXERS, install_mixer
from rollout_service.engine.transformers.precision import min_rows
from rollout_service.engine.transformers.residency import Residency
from rollout_service.engine.transformers.strip import KvBuffer, Run, Segment, State, build_strip

_ATTENTION = "octopus_strip"


class StripModel:
    """The model, its layers by kind, and one forward pass over many runs."""

    def __init__(
        self,
        path: str,
        *,
        device: str,
        dtype: str,
        head_dtype: str,
        mount_layers: tuple[int, ...] | None,
    ) -> None:
        """Load the model from a Hugging Face folder.

        Args:
            path: The folder.
            device: Torch device.
            dtype: Of weights and K/V: float32, bfloat16, float16, float64. Recurrent states are
                float32 for the narrow ones, float64 for float32 on the CPU.
            head_dtype: Of the logits: float32, at least, or model.
            mount_layers: Decoder layers whose attention reads mounted spans; None takes all
                attention layers of a hybrid, a middle quarter otherwise (design.md section 4).

        Raises:
            ConfigError: No model there, or a device, layer kind, dtype or mount layer that cannot
                be served.
        """
        self.device = torch.device(device)
        self.dtype = _dtype(dtype)
        is_wide = head_dtype == "float32"
        self.head_dtype = torch.promote_types(self.dtype, torch.float32) if is_wide else self.dtype
        self._min_rows = min_rows(self.dtype, self.device)
        self.module: Any = _load_model(path, self.dtype, self.device).requires_grad_(False)
        self.module.set_attn_implementation(_ATTENTION)
        self.config: Any = self.module.config.get_text_config()
        self._decoder: Any = self.module.get_decoder()
        self._head: Any = self.module.get_output_embeddings()
        self._logits_scaling = float(getattr(self.config, "logits_scaling", 1.0))
        _refuse_windows(self.config)
        self.initial_states: dict[int, State] = {}
        attention: list[int] = []
        for layer, block in enumerate(self._decoder.layers):
            mixer = _recurrent_mixer(layer, block)
            if mixer is None:
                attention.append(layer)
            else:
                self.initial_states[layer] = install_mixer(mixer, self.dtype)
        self.attention_layers = tuple(attention)
        self._attention_index = {layer: index for index, layer in enumerate(attention)}
        self.mount_layers = choose_mount_layers(
            attention, is_hybrid=self.is_recurrent, chosen=mount_layers
        )

    @property
    def vocab_size(self) -> int:
        """Rows of the output embedding."""
        return int(self._head.weight.shape[0])

    @property
    def is_recurrent(self) -> bool:
        """Whether a cursor needs a recurrent state beside its K/V."""
        return bool(self.initial_states)

    def new_run(
        self,
        cursor: Cursor,
        parent: Residency | None,
        path: list[Residency],
        mounts: list[tuple[Residency, int, int]],
        own: Residency | None,
        num_more: int,
    ) -> Run:
        """A run that computes what `cursor` lacks.

        Args:
            cursor: The cursor; its tokens are copied.
            parent: Its parent's residency; None at a root.
            path: Residencies from the root to the parent.
            mounts: Residencies of mounted sources with their spans.
            own: What is there of the cursor itself; None where nothing is.
            num_more: Tokens that may follow, as far as known.
        """
        start = own or parent
        buffers = []
        for index, layer in enumerate(self.attention_layers):
            pieces = [residency.keys_values[index] for residency in path]
            if layer in self.mount_layers:
                spans = [r.keys_values[index][:, :, begin:end] for r, begin, end in mounts]
                pieces = spans + pieces
            if own is not None:
                pieces.append(own.keys_values[index])
            buffers.append(KvBuffer(pieces, num_more))
        return Run(
            token_ids=list(cursor.token_ids),
            position_start=cursor.position_start,
            num_done=own.num_tokens if own is not None else 0,
            keys_values=buffers,
            states=dict(start.states if start is not None else self.initial_states),
            last_hidden=start.last_hidden if start is not None else None,
            num_resident=own.num_tokens if own is not None else 0,
        )

    def residency_of(self, run: Run) -> Residency:
        """What `run` leaves behind: its own K/V rows and the states at its end, copied out."""
        assert run.last_hidden is not None
        num_done = run.num_done
        return Residency(
            num_tokens=num_done,
            keys_values=[
                buffer.rows[:, :, buffer.num_rows - num_done :].to(self.dtype, copy=True)
                for buffer in run.keys_values
            ],
            states={layer: (c.clone(), s.clone()) for layer, (c, s) in run.states.items()},
            last_hidden=run.last_hidden.clone(),
        )

    def forward(self, work: list[tuple[Run, int]]) -> tuple[list[Segment], Tensor]:
        """Compute the next tokens of each run and advance it.

        Returns:
            Where each run's tokens stand, and their final hidden states `[T, hidden]`.
        """
        strip = build_strip(work, self._attention_index, self.device, min_rows=self._min_rows)
        hidden = self._decoder(
            input_ids=strip.token_ids,
            position_ids=strip.position_ids,
            use_cache=False,
            strip=strip,
        ).last_hidden_state[0]
        for segment in strip.segments:
            segment.run.num_done += segment.end - segment.begin
            segment.run.last_hidden = hidden[segment.end - 1]
        return strip.segments, hidden[: strip.segments[-1].end]

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits of final hidden states: `[N, hidden]` -> `[N, V]`, at least float32."""
        missing = self._min_rows - hidden.shape[0]
        filled = F.pad(hidden, (0, 0, 0, missing)) if missing > 0 else hidden
        logits = self._headed(filled)[: hidden.shape[0]] / self._logits_scaling
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def _headed(self, hidden: Tensor) -> Tensor:
        """Hidden states times the output embedding, in `head_dtype`."""
        if self.head_dtype == hidden.dtype:
            return self._head(hidden)
        logits = head_logits(hidden, self._head.weight, self.head_dtype)
        return logits if self._head.bias is None else logits + self._head.bias


def _load_model(path: str, dtype: torch.dtype, device: torch.device) -> Any:
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, local_files_only=True)
        return loaded.to(device).eval()
    # Without CUDA in it, PyTorch asserts.
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        raise ConfigError(
            f"the model cannot be loaded on {device}",
            value=path,
            limit="a Hugging Face folder",
            remedy=str(error),
        ) from error


def _dtype(name: str) -> torch.dtype:
    known = {
        "float32": torch.float32,
        "bfloat16": torch.bfloat16,
        "float16": torch.float16,
        "float64": torch.float64,
    }
    if name not in known:
        raise ConfigError("unknown dtype", value=name, limit=", ".join(known))
    return known[name]


def _recurrent_mixer(layer: int, block: nn.Module) -> nn.Module | None:
    """The recurrent mixer of a decoder layer; None where the layer attends.

    Raises:
        ConfigError: The layer's mixer is of a class that is not known here.
    """
    for child in block.children():
        name = type(child).__name__
        if name in MIXERS:
            return child
        if name.endswith("Attention") and hasattr(child, "k_proj"):
            return None
    raise ConfigError(
        f"layer {layer} mixes tokens in a way the transformers engine does not know",
        value=", ".join(type(child).__name__ for child in block.children()),
        limit=", ".join(("*Attention with k_proj", *MIXERS)),
    )


def _refuse_windows(config: Any) -> None:
    """Sliding and chunked attention would hide rows that a cursor counts as visible.

    Raises:
        ConfigError: The model has such layers.
    """
    kinds = getattr(config, "layer_types", None)
    windowed = {"sliding_attention", "chunked_attention"} & set(kinds or ())
    # Some families, as Mistral, tell the window alone, which all of their layers have.
    window = getattr(config, "sliding_window", None)
    slides = window is not None and getattr(config, "use_sliding_window", True)
    if kinds is None and slides and window < config.max_position_embeddings:
        windowed = {f"sliding_attention of {window} tokens"}
    if windowed:
        raise ConfigError(
            "the transformers engine serves full attention only",
            value=", ".join(sorted(windowed)),
            limit="full_attention, linear_attention, mamba",
        )


def _strip_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Hugging Face's attention seam; `strip` comes through the model's keyword arguments."""
    strip = kwargs["strip"]
    mixed = strip.attend(module.layer_idx, query[0], key[0], value[0], scaling)
    return mixed.unsqueeze(0), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """The strip knows what each row sees."""


AttentionInterface.register(_ATTENTION, _strip_attention)
AttentionMaskInterface.register(_ATTENTION, _no_mask)
