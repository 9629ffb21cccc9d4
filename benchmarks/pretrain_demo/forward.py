"""Forward pass of the demo's hybrid over episode DAGs, batched and padded.

Attention sees what a mask says; recurrent layers run along whole paths, gathered from the strip
and scattered back. It recomputes shared prefixes in those layers: simple, for tiny models only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

CHUNK = 32
"""Tokens whose updates of the recurrent state are solved for at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DagBatch:
    """B strips of T tokens, padded."""

    token_ids: torch.Tensor
    """`[B, T]` int64."""
    position_ids: torch.Tensor
    """Rotary positions, `[B, T]` int64."""
    visible: torch.Tensor
    """Whether row i attends to column j, `[B, T, T]` bool; every row sees itself."""
    paths: torch.Tensor
    """Strip indices of each path from its root, `[B, P, L]` int64; padding repeats index 0."""
    path_slot: torch.Tensor
    """Where each token is found in `paths` flattened to P * L, `[B, T]` int64."""


def hidden_states(model: Any, batch: DagBatch) -> torch.Tensor:
    """Final hidden states of `Qwen3_5ForCausalLM` over DAGs.

    Returns:
        `[B, T, D]`, normalised, ready for the output embedding.
    """
    decoder = model.model
    hidden = decoder.embed_tokens(batch.token_ids)
    # Text tokens have the same position on all three rotary axes.
    rotary = decoder.rotary_emb(hidden, batch.position_ids[None].expand(3, -1, -1))
    mask = batch.visible[:, None]
    for layer in decoder.layers:
        normed = layer.input_layernorm(hidden)
        if hasattr(layer, "linear_attn"):
            mixed = _along_paths(layer.linear_attn, normed, batch)
        else:
            mixed = layer.self_attn(normed, position_embeddings=rotary, attention_mask=mask)[0]
        hidden = hidden + mixed
        hidden = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
    return decoder.norm(hidden)


def _along_paths(mixer: Any, hidden: torch.Tensor, batch: DagBatch) -> torch.Tensor:
    num, count, length = batch.paths.shape
    width = hidden.shape[-1]
    index = batch.paths.reshape(num, count * length, 1).expand(-1, -1, width)
    rows = hidden.gather(1, index).reshape(num * count, length, width)
    mixed = gated_delta_net(mixer, rows).reshape(num, count * length, width)
    return mixed.gather(1, batch.path_slot[..., None].expand(-1, -1, width))


def gated_delta_net(mixer: Any, hidden: torch.Tensor) -> torch.Tensor:
    """What Hugging Face's `Qwen3_5GatedDeltaNet` computes from an empty state.

    Args:
        mixer: The layer's module; its key and value heads must be equally many.
        hidden: `[N, L, D]`; padding must stand at the end.
    """
    rows, length, _ = hidden.shape
    qkv = mixer.in_proj_qkv(hidden).transpose(1, 2)
    width = mixer.conv1d.kernel_size[0]
    qkv = F.conv1d(F.pad(qkv, (width - 1, 0)), mixer.conv1d.weight, groups=qkv.shape[1])
    query, key, value = F.silu(qkv).split([mixer.key_dim, mixer.key_dim, mixer.value_dim], dim=1)
    query, key = (_unit(_heads(x, mixer.num_k_heads)) for x in (query, key))
    value = _heads(value, mixer.num_v_heads)
    beta = mixer.in_proj_b(hidden).sigmoid().transpose(1, 2)
    decay = -mixer.A_log.exp() * F.softplus(mixer.in_proj_a(hidden) + mixer.dt_bias)
    mixed = delta_rule(
        query * mixer.head_k_dim**-0.5, key, value, decay.transpose(1, 2), beta
    ).transpose(1, 2)
    gate = mixer.in_proj_z(hidden).reshape(-1, mixer.head_v_dim)
    normed = mixer.norm(mixed.reshape(-1, mixer.head_v_dim), gate)
    return mixer.out_proj(normed.reshape(rows, length, -1))


def delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    decay: torch.Tensor,
    beta: torch.Tensor,
) -> torch.Tensor:
    """Gated delta rule from a zero state, in chunks.

    Args:
        query: Scaled, `[N, H, L, K]`.
        key: Of unit length, `[N, H, L, K]`.
        value: `[N, H, L, V]`.
        decay: Log of the state's decay at each token, `[N, H, L]`.
        beta: Strength of each update, `[N, H, L]`.

    Returns:
        `[N, H, L, V]`.
    """
    length = query.shape[2]
    query, key, value, decay, beta = (_chunks(x) for x in (query, key, value, decay, beta))
    log_decay = decay.cumsum(-1)
    upper = torch.ones(CHUNK, CHUNK, dtype=torch.bool, device=query.device).triu(1)
    between = (log_decay[..., :, None] - log_decay[..., None, :]).masked_fill(upper, -torch.inf)
    between = between.exp()
    scaled = key * beta[..., None]
    system = (scaled @ key.transpose(-1, -2)) * between
    right = torch.cat([value * beta[..., None], scaled * log_decay.exp()[..., None]], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    written, read = solved.split([value.shape[-1], key.shape[-1]], dim=-1)
    within = (query @ key.transpose(-1, -2)) * between
    query = query * log_decay.exp()[..., None]
    key = key * (log_decay[..., -1:] - log_decay).exp()[..., None]
    whole = log_decay[..., -1].exp()[..., None, None]
    state = query.new_zeros(*query.shape[:2], key.shape[-1], value.shape[-1])
    outputs = []
    for index in range(query.shape[2]):
        new = written[:, :, index] - read[:, :, index] @ state
        outputs.append(query[:, :, index] @ state + within[:, :, index] @ new)
        state = state * whole[:, :, index] + key[:, :, index].transpose(-1, -2) @ new
    return torch.cat(outputs, dim=2)[:, :, :length]


def _chunks(x: torch.Tensor) -> torch.Tensor:
    """`[N, H, L, ...]` padded with zeros and cut: `[N, H, C, CHUNK, ...]`."""
    pad = -x.shape[2] % CHUNK
    x = F.pad(x, (0, 0, 0, pad) if x.ndim == 4 else (0, pad))
    return x.unflatten(2, (-1, CHUNK))


def _heads(x: torch.Tensor, num_heads: int) -> torch.Tensor:
    """`[N, H * K, L]` as `[N, H, L, K]`."""
    return x.unflatten(1, (num_heads, -1)).transpose(2, 3)


def _unit(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)
