"""Phase one: copying runs of random tokens out of a span that only attention can see.

Each row is a source and a reader, side by side. Recurrent layers start anew at the reader, as
they do for a mounted span, so that attention has to learn the copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.pretrain_demo.forward import DagBatch

RUN = 8
"""Tokens of one copied run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyTask:
    """Sizes of the synthetic rows."""

    vocab_size: int
    span: int = 64
    """Tokens of the source and of the reader; a multiple of `RUN`."""

    def draw(self, num_rows: int, generator: torch.Generator) -> tuple[DagBatch, torch.Tensor]:
        """Random rows and which tokens can be known from what came before.

        Returns:
            The batch, T = 2 * span, and a mask of targets, `[B, T]` bool.
        """
        device, span = generator.device, self.span
        # Few distinct tokens in half of the rows: a copy must follow more than one token back.
        distinct = torch.randint(8, self.vocab_size, (num_rows, 1), generator=generator,
                                 device=device)  # fmt: skip
        source = torch.randint(1 << 30, (num_rows, span), generator=generator, device=device)
        shift = torch.randint(self.vocab_size, (num_rows, 1), generator=generator, device=device)
        source = (source % distinct + shift) % self.vocab_size
        starts = torch.randint(
            span - RUN, (num_rows, span // RUN), generator=generator, device=device
        )
        runs = starts[..., None] + torch.arange(RUN, device=device)
        reader = source.gather(1, runs.reshape(num_rows, span))
        known = torch.zeros(num_rows, 2 * span, dtype=torch.bool, device=device)
        offset = torch.arange(span, device=device) % RUN
        # Two tokens name the run; where they are ambiguous the loss has a floor above zero.
        known[:, span:] = offset >= 2
        return self._batch(torch.cat([source, reader], 1)), known

    def _batch(self, token_ids: torch.Tensor) -> DagBatch:
        num_rows, length = token_ids.shape
        order = torch.arange(length, device=token_ids.device)
        paths = order.reshape(1, 2, self.span)
        return DagBatch(
            token_ids=token_ids,
            position_ids=order.expand(num_rows, -1),
            visible=(order[:, None] >= order[None]).expand(num_rows, -1, -1),
            paths=paths.expand(num_rows, -1, -1),
            path_slot=order.expand(num_rows, -1),
        )
