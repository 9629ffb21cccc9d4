"""The reference: every root-to-leaf path run alone through stock Hugging Face models.

Knows nothing of packing. A path that mounts runs each mounted source first, on the source's own
path, positions and mounts, with gradient and without loss.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import peft
import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

from harness_sdk.record import EpisodeRecord, Node

Token = tuple[int, int]
"""(record node, offset) of one token."""

_ATTENTION = "path_reference"


def load_reference(
    model_path: Path, adapter_path: Path, *, dtype: torch.dtype = torch.float32
) -> peft.PeftModel:
    """The model with its adapter as PEFT and Hugging Face load them from their files."""
    model = AutoModelForCausalLM.from_pretrained(
        str(model_path),
        dtype=dtype,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
        return peft.PeftModel.from_pretrained(
            model.eval(), str(adapter_path), is_trainable=True
        ).eval()


def reference_logprobs(model: peft.PeftModel, record: EpisodeRecord) -> dict[Token, torch.Tensor]:
    """Log-probability of every sampled token that has a token before it on its path.

    A token on several paths is taken from the first of them; the others are run as well and
    must agree.
    """
    runner = _PathRunner(model, record)
    found: dict[Token, torch.Tensor] = {}
    for leaf in leaves(record):
        for token, value in runner.path_logprobs(leaf).items():
            if token in found:
                torch.testing.assert_close(value, found[token], rtol=1e-5, atol=1e-5)
            else:
                found[token] = value
    return found


def leaves(record: EpisodeRecord) -> list[int]:
    """Nodes without children, in the record's order."""
    parents = {node.parent for node in record.nodes}
    return [node.node_id for node in record.nodes if node.node_id not in parents]


def path_to(record: EpisodeRecord, node_id: int) -> list[Node]:
    """Nodes from the root to `node_id`."""
    by_id = {node.node_id: node for node in record.nodes}
    path = []
    while node_id >= 0:
        path.append(by_id[node_id])
        node_id = by_id[node_id].parent
    return path[::-1]


@dataclass(eq=False)
class _Visible:
    """What one forward pass sees beside its own rows, and the keys and values that it leaves."""

    mount_layers: tuple[int, ...]
    mask: torch.Tensor
    """Which row sees which mounted token, `[L, M]` bool."""
    keys: dict[int, torch.Tensor]
    """By layer, `[H, M, D]`."""
    values: dict[int, torch.Tensor]
    left: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


class _PathRunner:
    def __init__(self, model: peft.PeftModel, record: EpisodeRecord) -> None:
        self.model: Any = model
        self.record = record
        self.sources: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {}
        self.mounts = any(node.mounts for node in record.nodes)
        self.model.get_base_model().set_attn_implementation(_ATTENTION if self.mounts else "eager")

    def path_logprobs(self, leaf: int) -> dict[Token, torch.Tensor]:
        path = path_to(self.record, leaf)
        logits, _ = self.forward(path)
        rows = [(node, offset) for node in path for offset in range(len(node.token_ids))]
        found = {}
        for row, (node, offset) in enumerate(rows):
            if node.sampled[offset] and row:
                logit = logits[row - 1].to(torch.promote_types(logits.dtype, torch.float32))
                tempered = logit / (node.temperature or 1.0)
                found[node.node_id, offset] = tempered.log_softmax(0)[node.token_ids[offset]]
        return found

    def forward(self, path: list[Node]) -> tuple[torch.Tensor, _Visible | None]:
        token_ids = torch.tensor([[token for node in path for token in node.token_ids]])
        positions = [
            node.position_start + offset for node in path for offset in range(len(node.token_ids))
        ]
        extra: dict[str, Any] = {}
        visible = self.visible(path) if self.mounts else None
        if visible is not None:
            extra["visible"] = visible
        out = self.model(
            input_ids=token_ids, position_ids=torch.tensor([positions]), use_cache=False, **extra
        )
        return out.logits[0], visible

    def visible(self, path: list[Node]) -> _Visible:
        """Mounted tokens of the path's nodes; what lies on the path itself is seen there."""
        own = {(node.node_id, o) for node in path for o in range(len(node.token_ids))}
        by_node = [
            {(m.node_id, o) for m in node.mounts for o in range(m.begin, m.end)} - own
            for node in path
        ]
        tokens = sorted(set().union(*by_node))
        rows = [
            [token in seen for token in tokens]
            for node, seen in zip(path, by_node, strict=True)
            for _ in node.token_ids
        ]
        keys: dict[int, torch.Tensor] = {}
        values: dict[int, torch.Tensor] = {}
        for layer in self.record.mount_layers if tokens else ():
            pairs = [self.source(node_id)[layer] for node_id, _ in tokens]
            offsets = [offset for _, offset in tokens]
            keys[layer] = torch.stack(
                [k[:, o] for (k, _), o in zip(pairs, offsets, strict=True)], 1
            )
            values[layer] = torch.stack(
                [v[:, o] for (_, v), o in zip(pairs, offsets, strict=True)], 1
            )
        mask = torch.tensor(rows, dtype=torch.bool).view(len(rows), len(tokens))
        return _Visible(self.record.mount_layers, mask, keys, values)

    def source(self, node_id: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Keys and values of a node's own tokens by layer, from a run of its path alone."""
        if node_id not in self.sources:
            path = path_to(self.record, node_id)
            _, visible = self.forward(path)
            assert visible is not None
            count = len(path[-1].token_ids)
            self.sources[node_id] = {
                layer: (keys[:, -count:], values[:, -count:])
                for layer, (keys, values) in visible.left.items()
            }
        return self.sources[node_id]


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    scaling: float,
    visible: _Visible,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Plain softmax attention of one path over its mounted keys and itself."""
    layer = module.layer_idx
    visible.left[layer] = (key[0], value[0])
    rows = query.shape[2]
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()
    keys, values = key[0], value[0]
    if layer in visible.keys:
        keys = torch.cat([visible.keys[layer], keys], 1)
        values = torch.cat([visible.values[layer], values], 1)
        mask = torch.cat([visible.mask, mask], 1)
    group = query.shape[1] // keys.shape[0]
    keys, values = keys.repeat_interleave(group, 0), values.repeat_interleave(group, 0)
    scores = (query[0] @ keys.mT * scaling).masked_fill(~mask, float("-inf"))
    return (scores.softmax(-1) @ values).transpose(0, 1)[None], None


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, lambda *args, **kwargs: None)


class KeepFloat64(TorchFunctionMode):
    """Models cast to float32 inside norms and softmax; leave float64 tensors as they are."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype is torch.float64:
            if func is torch.Tensor.float:
                return args[0]
            if func is torch.Tensor.to:
                args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
            if kwargs.get("dtype") is torch.float32:
                kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


@contextlib.contextmanager
def token_recurrences() -> Iterator[list[str]]:
    """Replace Hugging Face's chunked recurrences by loops over tokens.

    Yields:
        Names of the replaced functions, one for each call.
    """
    calls: list[str] = []
    replaced = [
        ("qwen3_5", "torch_chunk_gated_delta_rule", token_gated_delta_rule),
        ("qwen3_5_moe", "torch_chunk_gated_delta_rule", token_gated_delta_rule),
        ("qwen3_next", "torch_chunk_gated_delta_rule", token_gated_delta_rule),
        ("granitemoehybrid", "mamba2_chunk_scan", token_mamba_scan),
    ]
    with contextlib.ExitStack() as stack:
        for family, name, loop in replaced:
            module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
            original = getattr(module, name)

            def counted(*args: Any, _loop: Any = loop, _name: str = name, **kwargs: Any) -> Any:
                calls.append(_name)
                return _loop(*args, **kwargs)

            setattr(module, name, counted)
            stack.callback(setattr, module, name, original)
        yield calls


def token_gated_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Gated delta rule token by token; `[B, L, H, D]` as Hugging Face calls it."""
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    group = value.shape[2] // key.shape[2]
    query = query.repeat_interleave(group, 2) * query.shape[-1] ** -0.5
    key = key.repeat_interleave(group, 2)
    state = value.new_zeros(value.shape[0], value.shape[2], key.shape[3], value.shape[3])
    outputs = []
    rows = (x[..., None, :] for x in (query, key, value, g.exp()[..., None], beta[..., None]))
    # Unbound at once: the gradient of a token's slice would be as large as the sequence.
    for q, k, v, decay, share in zip(*(x.unbind(1) for x in rows), strict=True):
        state = state * decay
        state = state + k.mT * ((v - k @ state) * share)
        outputs.append(q @ state)
    return torch.stack(outputs, 1).squeeze(-2), None


def token_mamba_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor,
    dt_bias: torch.Tensor,
    dt_limit: tuple[float, float],
    return_final_states: bool = False,
    **_: Any,
) -> torch.Tensor:
    """Mamba-2 recurrence token by token; `[B, L, H, P]` as Hugging Face calls it."""
    assert not return_final_states
    step = F.softplus(dt + dt_bias).clamp(*dt_limit)
    group = hidden_states.shape[2] // B.shape[2]
    B, C = B.repeat_interleave(group, 2), C.repeat_interleave(group, 2)
    state = hidden_states.new_zeros(*hidden_states.shape[:1], *hidden_states.shape[2:], B.shape[3])
    outputs = []
    inputs = (hidden_states * step[..., None])[..., None]
    tokens = (inputs, B[..., None, :], C[..., None], (step * A).exp()[..., None, None])
    for x, b, c, decay in zip(*(each.unbind(1) for each in tokens), strict=True):
        state = state * decay + x * b
        outputs.append(state @ c)
    return torch.stack(outputs, 1).squeeze(-1) + D[:, None] * hidden_states
