"""The policy that is trained: a Hugging Face model with LoRA, computing packed strips."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import peft
import torch
from safetensors import SafetensorError
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import AutoModelForCausalLM

from harness_sdk.errors import ConfigError
from harness_sdk.fingerprints import model_hash
from trainer_service.dag import flat_episode
from trainer_service.lora import (
    LoraOptions,
    adapter_tensors,
    add_adapter,
    multiply_in_model_type,
    save_adapter,
    tensor_checksums,
)
from trainer_service.models import (
    PackedTree,
    default_mount_layers,
    model_hooks,
    use_fused,
    use_row_tiles,
    use_tree,
)
from trainer_service.objectives.base import PackedLogprobs
from trainer_service.pieces import PieceBoundary, PiecePlan, PieceRun, num_pieces
from trainer_service.sharding import shard_layers
from trainer_service.strip import Strip
from tree_kernels.layout import Layout, PieceLayout
from tree_kernels.logprob import action_logprobs

__all__ = ["LoraOptions", "PackedLogprobs", "Policy"]

_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
HEAD_DTYPES = ("float32", "model")


class Policy:
    """A causal language model and its adapter; all methods run on the caller's thread."""

    def __init__(
        self,
        model: Any,
        *,
        model_path: str | Path,
        mount_layers: tuple[int, ...] | None = None,
        head_dtype: str = "float32",
        adapter: peft.PeftModel | None = None,
    ) -> None:
        """Wrap a loaded model; use `load`.

        Args:
            model: The Hugging Face causal language model, with LoRA layers where there are any.
            model_path: Folder that it came from.
            mount_layers: Decoder layers that read mounts; None takes the architecture's own.
            head_dtype: Of the logits: `float32`, at least, or `model`.
            adapter: The PEFT model around it; None trains all weights.
        """
        config = model.config.get_text_config()
        hooks = model_hooks(config)
        use_tree(model, hooks.mixers)
        self.mount_layers = (
            mount_layers if mount_layers is not None else default_mount_layers(config)
        )
        self._head_dtype = _head_dtype(head_dtype, model.dtype)
        self._model = model
        self._adapter = adapter
        self._model_path = Path(model_path)
        self._logit_scale = hooks.logit_scale(config)
        self.is_sharded = False
        """Whether ranks hold parts of the base weights, and compute together."""

    @classmethod
    def load(
        cls,
        model_path: str | Path,
        *,
        lora: LoraOptions | None,
        dtype: str = "float32",
        device: str = "cpu",
        adapter_path: str | Path | None = None,
        mount_layers: tuple[int, ...] | None = None,
        head_dtype: str = "float32",
        activation_checkpointing: bool = False,
        activation_tile_tokens: int = 16_384,
        mesh: DeviceMesh | None = None,
    ) -> Policy:
        """Load a model folder.

        Args:
            model_path: Folder in Hugging Face form.
            lora: The adapter; None trains all weights.
            dtype: `float32`, `bfloat16`, `float16` or `float64`; adapters are float32 at least.
            device: Where it computes.
            adapter_path: A stored adapter to go on with.
            mount_layers: Decoder layers that read mounts; None takes the architecture's own.
            head_dtype: Of the logits: `float32`, at least, or `model`.
            activation_checkpointing: Keep one activation per layer and compute the rest again.
            activation_tile_tokens: With it, rows of a dense feed-forward part in memory at once.
            mesh: Ranks that the base weights are divided among; None keeps all of them here.

        Raises:
            ConfigError: No model in the folder, or an unknown dtype, head dtype, device,
                architecture or LoRA target.
            AdapterError: The stored adapter does not fit.
        """
        if dtype not in _DTYPES:
            raise ConfigError("unknown dtype", value=dtype, limit=", ".join(_DTYPES))
        # To be divided, the whole model need not fit the device: layers go there one by one.
        policy = cls.from_model(
            _load_model(Path(model_path), dtype, device if mesh is None else "cpu"),
            model_path=model_path,
            lora=lora,
            adapter_path=adapter_path,
            mount_layers=mount_layers,
            head_dtype=head_dtype,
            activation_checkpointing=activation_checkpointing,
            activation_tile_tokens=activation_tile_tokens,
        )
        if mesh is not None:
            policy.shard(mesh, device)
        return policy

    @classmethod
    def from_model(
        cls,
        model: Any,
        *,
        model_path: str | Path,
        lora: LoraOptions | None,
        adapter_path: str | Path | None = None,
        mount_layers: tuple[int, ...] | None = None,
        head_dtype: str = "float32",
        activation_checkpointing: bool = False,
        activation_tile_tokens: int = 16_384,
    ) -> Policy:
        """As `load`, of a Hugging Face model that is there already."""
        use_fused(model)
        if activation_checkpointing:
            # Renamed in transformers 5.24; the first argument is the same. No layer draws numbers.
            new_name = getattr(model, "activation_checkpointing_enable", None)
            (new_name or model.gradient_checkpointing_enable)(
                {"use_reentrant": False, "preserve_rng_state": False}
            )
            row_modules = model_hooks(model.config.get_text_config()).row_modules
            use_row_tiles(model, row_modules, activation_tile_tokens)
        adapter = None
        if lora is not None:
            hooks = model_hooks(model.config.get_text_config())
            targets = lora.target_modules or hooks.lora_targets
            adapter = add_adapter(model, lora, targets, adapter_path)
            multiply_in_model_type(adapter)
        # Hugging Face checkpoints in training mode only; no layer here drops anything out.
        model.train(activation_checkpointing)
        return cls(
            model,
            model_path=model_path,
            mount_layers=mount_layers,
            head_dtype=head_dtype,
            adapter=adapter,
        )

    def shard(self, mesh: DeviceMesh, device: str) -> None:
        """Divide the base weights among the ranks of `mesh`; each of them calls it.

        From then on every pass is one of all ranks: each calls `logprobs`, what is built on it and
        the backward as often as the others, with the same `num_passes`.

        Args:
            mesh: Ranks, in one dimension.
            device: Where this one computes.
        """
        shard_layers(self._model, mesh)
        self._model.to(device)
        self.is_sharded = True

    def logprobs(
        self, strip: Strip, *, max_piece_tokens: int | None = None, num_passes: int = 1
    ) -> PackedLogprobs:
        """Log-probability and entropy of every action of `strip`; use their own `backward`.

        Args:
            strip: The packed episodes.
            max_piece_tokens: A longer strip is computed in pieces of at most so many rows, with the
                memory that `pieces.py` states; None computes it at once.
            num_passes: Of a sharded policy, the same on all ranks: most pieces that one of them
                computes now. Where the strip has fewer, the passes that are left have no effect.

        Raises:
            ConfigError: The strip was sampled with other mount layers.
        """
        if strip.mount_layers is not None and strip.mount_layers != self.mount_layers:
            raise ConfigError(
                "episodes were sampled with other mount layers than the trainer's",
                value=strip.mount_layers,
                limit=str(self.mount_layers),
                remedy="set the same mount_layers on rollout and trainer",
            )
        strip = strip.to(self.device)
        if max(num_passes, num_pieces(strip.num_tokens, max_piece_tokens)) > 1:
            return self._piecewise_logprobs(strip, max_piece_tokens, num_passes)
        hidden = self._hidden(strip, slice(None), self._tree(strip.layout))
        found = self._action_logprobs(strip, hidden[strip.action_source], slice(None))
        return PackedLogprobs(policy_logprobs=found[0], entropy=found[1])

    @torch.no_grad()
    def reference_logprobs(
        self, strip: Strip, *, max_piece_tokens: int | None = None, num_passes: int = 1
    ) -> torch.Tensor:
        """Log-probability of every action under the base model, the adapter off, `[A]`."""
        with self._require_adapter().disable_adapter():
            found = self.logprobs(strip, max_piece_tokens=max_piece_tokens, num_passes=num_passes)
        return found.policy_logprobs

    def _piecewise_logprobs(
        self, strip: Strip, max_tokens: int | None, num_passes: int
    ) -> PackedLogprobs:
        run = PieceRun(PiecePlan(strip.layout, max_tokens or strip.num_tokens))
        num_idle = max(num_passes - len(run.plan.pieces), 0)
        actions = [
            torch.isin(strip.action_source, self._rows(piece)).nonzero()[:, 0]
            for piece in run.plan.pieces
        ]
        by_piece = dict(zip(run.plan.pieces, actions, strict=True))

        def compute(piece: PieceLayout, boundary: PieceBoundary) -> tuple[torch.Tensor, ...]:
            rows, own = self._rows(piece), by_piece[piece]
            hidden = self._hidden(strip, rows, self._tree(piece, boundary))
            sources = torch.searchsorted(rows, strip.action_source[own])
            return self._action_logprobs(strip, hidden[sources], own)

        with torch.no_grad():
            outputs = zip(*run.forward(compute), strict=True)
            self._idle(num_idle)
        order = torch.cat(actions).argsort()
        logprobs, entropy = (torch.cat(values)[order] for values in outputs)
        if not torch.is_grad_enabled():
            return PackedLogprobs(policy_logprobs=logprobs, entropy=entropy)
        leaves = logprobs.requires_grad_(), entropy.requires_grad_()

        def pieces_backward() -> None:
            grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]
            run.backward(compute, [tuple(grad[own] for grad in grads) for own in actions])
            self._idle(num_idle)

        return PackedLogprobs(
            policy_logprobs=logprobs, entropy=entropy, pieces_backward=pieces_backward
        )

    def _idle(self, num_passes: int) -> None:
        """Go through the model, and back where autograd records, without effect."""
        for _ in range(num_passes):
            found = self.logprobs(flat_episode((0, 0)))
            if torch.is_grad_enabled():
                found.backward(found.policy_logprobs.sum() * 0.0)

    def _rows(self, piece: PieceLayout) -> torch.Tensor:
        return torch.from_numpy(piece.rows).to(self.device)

    def _tree(self, layout: Layout, boundary: PieceBoundary | None = None) -> PackedTree:
        return PackedTree(
            layout=layout, mount_layers=frozenset(self.mount_layers), boundary=boundary
        )

    def _hidden(self, strip: Strip, rows: torch.Tensor | slice, tree: PackedTree) -> torch.Tensor:
        """Final hidden states of `rows`, `[n, D]`."""
        return self._model.model(
            input_ids=strip.token_ids[rows][None],
            position_ids=strip.position_ids[rows][None],
            use_cache=False,
            tree=tree,
        ).last_hidden_state[0]

    def _action_logprobs(
        self, strip: Strip, hidden: torch.Tensor, actions: torch.Tensor | slice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability and entropy of `actions`, each `[a]`, from their source rows' states."""
        temperature = torch.where(strip.temperature > 0, strip.temperature, 1.0)[actions]
        return action_logprobs(
            hidden,
            self._model.get_output_embeddings().weight,
            strip.action_target[actions],
            self._logit_scale / temperature,
            head_dtype=self._head_dtype,
        )

    @torch.no_grad()
    def token_logprobs(self, token_ids: Sequence[int]) -> tuple[float, ...]:
        """Log-probability of `token_ids[1:]` in a cold run of the tokens alone: the probe."""
        return tuple(self.logprobs(flat_episode(token_ids)).policy_logprobs.tolist())

    @property
    def dtype(self) -> str:
        """Type of the weights, which the rollout's must have too."""
        return str(self._model.dtype).removeprefix("torch.")

    @property
    def head_dtype(self) -> str:
        """Type of the logits, which the rollout's must have too."""
        return str(self._head_dtype).removeprefix("torch.")

    @property
    def vocab_size(self) -> int:
        """Token ids are below it."""
        return self._model.get_input_embeddings().num_embeddings

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self._model.device

    def modules(self) -> Iterator[tuple[str, nn.Module]]:
        """The model's modules by name, adapters included."""
        return self._model.named_modules()

    def named_trainable_parameters(self) -> dict[str, nn.Parameter]:
        """What the optimiser updates, by the name within the Hugging Face model."""
        return {
            name: parameter
            for name, parameter in self._model.named_parameters()
            if parameter.requires_grad
        }

    def trainable_parameters(self) -> list[nn.Parameter]:
        """What the optimiser updates."""
        return list(self.named_trainable_parameters().values())

    def adapter_tensors(self) -> dict[str, torch.Tensor]:
        """The adapter's tensors by the names that PEFT's files use."""
        return adapter_tensors(self._require_adapter())

    def checksums(self) -> dict[str, str]:
        """sha256 of each adapter tensor's little-endian float32 bytes, by name."""
        return tensor_checksums(self.adapter_tensors())

    def save_adapter(self, folder: str | Path) -> None:
        """Write the adapter to `folder` as PEFT does, in float32."""
        save_adapter(self._require_adapter(), folder)

    def save_model(self, folder: str | Path) -> None:
        """Write the whole model to `folder` in Hugging Face form; only without an adapter.

        Raises:
            ConfigError: The policy trains an adapter.
        """
        if self._adapter is not None:
            raise ConfigError("the policy trains an adapter", remedy="use save_adapter")
        self._model.save_pretrained(str(folder))

    @cached_property
    def model_hash(self) -> str:
        """Hash of the base model's folder, as the rollout's engines know it."""
        return model_hash(self._model_path)

    def _require_adapter(self) -> peft.PeftModel:
        if self._adapter is None:
            raise ConfigError(
                "the policy trains all weights", remedy="give lora options to Policy.load"
            )
        return self._adapter


def _head_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    if name not in HEAD_DTYPES:
        raise ConfigError("unknown head_dtype", value=name, limit=", ".join(HEAD_DTYPES))
    return model_dtype if name == "model" else torch.promote_types(model_dtype, torch.float32)


def _load_model(folder: Path, dtype: str, device: str) -> Any:
    # Grouped matrix products of experts know no float64.
    experts = {"experts_implementation": "eager"} if dtype == "float64" else {}
    try:
        model: Any = AutoModelForCausalLM.from_pretrained(
            str(folder), dtype=_DTYPES[dtype], local_files_only=True, **experts
        )
        return model.to(device).eval()
    # Without CUDA in it, PyTorch asserts.
    except (OSError, ValueError, RuntimeError, AssertionError, SafetensorError) as error:
        raise ConfigError(
            f"the model cannot be loaded on {device}", value=folder, remedy=str(error)
        ) from error
