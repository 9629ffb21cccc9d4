"""Per-architecture hooks: how a Hugging Face model computes a packed tree."""

from trainer_service.models.fused import use_fused
from trainer_service.models.registry import ModelHooks, default_mount_layers, model_hooks
from trainer_service.models.row_tiles import use_row_tiles
from trainer_service.models.tree_forward import TREE_ATTENTION, PackedTree, use_tree

__all__ = [
    "TREE_ATTENTION",
    "ModelHooks",
    "PackedTree",
    "default_mount_layers",
    "model_hooks",
    "use_fused",
    "use_row_tiles",
    "use_tree",
]
