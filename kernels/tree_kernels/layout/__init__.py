"""Where the rows of a packed tree stand: order, visibility, chunks, tiles."""

from tree_kernels.layout.chains import ChainTable
from tree_kernels.layout.chunks import ChunkTable
from tree_kernels.layout.order import heavy_first_order
from tree_kernels.layout.tiles import AttentionTiles, TileBatch
from tree_kernels.layout.tree import MountRectangle, TreeLayout

__all__ = [
    "AttentionTiles",
    "ChainTable",
    "ChunkTable",
    "MountRectangle",
    "TileBatch",
    "TreeLayout",
    "heavy_first_order",
]
