"""Where the rows of a packed tree stand: order, visibility, chunks, parts of attention."""

from tree_kernels.layout.chains import ChainTable
from tree_kernels.layout.chunks import ChunkTable
from tree_kernels.layout.order import heavy_first_order
from tree_kernels.layout.parts import AttentionParts, Grid
from tree_kernels.layout.piece import PieceLayout, places
from tree_kernels.layout.plan import cut_pieces
from tree_kernels.layout.tree import MountRectangle, TreeLayout

Layout = TreeLayout | PieceLayout
"""What the operators compute."""

__all__ = [
    "AttentionParts",
    "ChainTable",
    "ChunkTable",
    "Grid",
    "Layout",
    "MountRectangle",
    "PieceLayout",
    "TreeLayout",
    "cut_pieces",
    "heavy_first_order",
    "places",
]
