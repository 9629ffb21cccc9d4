"""The packed strip: every token of a forest of episodes once, and the actions on it."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import NamedTuple

import torch

from tree_kernels.layout import TreeLayout


class StripNode(NamedTuple):
    """A maximal token run with one parent and one mount set."""

    episode: int
    """Index in the packed records."""
    parent: int
    """Index in `Strip.nodes`, -1 at a root."""
    start: int
    """First row."""
    length: int
    """Rows."""
    record_nodes: tuple[int, ...]
    """Ids of the record's nodes that were merged into this one."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Strip:
    """Packed episodes in heavy-first depth-first order; T rows, A actions, E episodes, P paths.

    Example:
        Prompt 7 8, sampled 9, then two branches that sample 1 and 2: `token_ids=[7, 8, 9, 1, 2]`,
        `action_source=[1, 2, 2]`, `action_target=[9, 1, 2]`, `leaf_counts=[2, 1, 1]`.
    """

    token_ids: torch.Tensor
    """`[T]` int64."""
    position_ids: torch.Tensor
    """Rotary positions as recorded, `[T]` int64."""
    nodes: tuple[StripNode, ...]
    """In strip order."""
    layout: TreeLayout
    """What each row sees."""
    mount_layers: tuple[int, ...] | None
    """Decoder layers that read mounts, as the records say; None where nothing is mounted."""

    action_source: torch.Tensor
    """Row whose hidden state predicts the action: the row before it on its path, `[A]` int64."""
    action_target: torch.Tensor
    """Token that was sampled, `[A]` int64."""
    action_row: torch.Tensor
    """Row of the sampled token itself, `[A]` int64."""
    action_episode: torch.Tensor
    """Index in the packed records, `[A]` int64."""
    sampled_logprobs: torch.Tensor
    """Log-probability when it was sampled, in nats, `[A]` float32."""
    temperature: torch.Tensor
    """Of the distribution sampled from; 0 (greedy) stands for the untempered one, `[A]` float64."""
    policy_version: torch.Tensor
    """Version that sampled it, `[A]` int64."""
    is_demonstration: torch.Tensor
    """Supplied by the agent, not sampled by the policy, `[A]` bool."""
    leaf_begin: torch.Tensor
    """First of the paths through the action, `[A]` int64; paths count over the whole strip."""
    leaf_counts: torch.Tensor
    """Paths through the action, g_t: `leaf_begin` and those that follow, `[A]` int64."""

    path_episode: torch.Tensor
    """Episode of each root-to-leaf path, `[P]` int64."""
    num_paths: torch.Tensor
    """Paths of each episode, K, `[E]` int64."""
    num_actions: torch.Tensor
    """Tokens that the policy sampled in each episode, Z, `[E]` int64; no demonstrations."""
    tokens_flat: int
    """Tokens if each path were computed alone."""

    @property
    def num_tokens(self) -> int:
        """Rows, T: the tokens that are computed."""
        return self.token_ids.shape[0]

    @property
    def num_episodes(self) -> int:
        """Packed records, E."""
        return self.num_paths.shape[0]

    def to(self, device: torch.device | str) -> Strip:
        """The same strip on `device`."""
        moved = {
            each.name: value.to(device)
            for each in fields(self)
            if isinstance(value := getattr(self, each.name), torch.Tensor | TreeLayout)
        }
        return replace(self, **moved)
