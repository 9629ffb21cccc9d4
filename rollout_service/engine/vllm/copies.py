"""What the core tells the workers to copy between blocks before a step computes anything."""

from __future__ import annotations

from dataclasses import dataclass, field

COPIES_ATTRIBUTE = "octopus_copies"
"""Where a scheduler output carries a step's `Copies` to the workers."""


@dataclass(slots=True)
class Copies:
    """Work for the model runner before the next forward pass."""

    blocks: list[tuple[int, int, int]] = field(default_factory=list)
    """(group, source block, destination block)."""
    rows: list[tuple[int, int, int, int, int, int]] = field(default_factory=list)
    """(group, source block, first row, destination block, first row, number)."""
    zeroed: list[tuple[int, int]] = field(default_factory=list)
    """(group, state block) of runs that begin without a parent but with mounts."""

    def mark(self) -> tuple[int, int, int]:
        """Where the lists end now."""
        return len(self.blocks), len(self.rows), len(self.zeroed)

    def undo(self, mark: tuple[int, int, int]) -> None:
        """Drop what came after `mark`."""
        del self.blocks[mark[0] :], self.rows[mark[1] :], self.zeroed[mark[2] :]
