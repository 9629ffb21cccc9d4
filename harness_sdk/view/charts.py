"""One curve as inline SVG; its colours are the page's CSS variables."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

_WIDTH, _HEIGHT = 680, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 14, 14, 40


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """The vertical axis: what stands where."""

    low: float
    high: float
    ticks: tuple[tuple[float, str], ...]
    """Value and label."""
    place: Callable[[float], float] = float
    """Value to the scale that is linear on paper."""

    def share(self, value: float) -> float:
        """Height of `value` between `low`, 0, and `high`, 1."""
        low, high = self.place(self.low), self.place(self.high)
        return (self.place(value) - low) / (high - low)


def linear_axis(low: float, high: float, num_steps: int) -> Axis:
    """Evenly divided.

    Example:
        `linear_axis(0, 1, 4)` has ticks at 0, 0.25, 0.5, 0.75 and 1.
    """
    values = [low + (high - low) * i / num_steps for i in range(num_steps + 1)]
    return Axis(low=low, high=high, ticks=tuple((value, f"{value:g}") for value in values))


def log_axis(values: Sequence[float], limit: float) -> Axis:
    """Powers of ten around the positive ones of `values`, up to `limit` at least."""
    shown = [value for value in values if value > 0] or [limit]
    first = math.floor(math.log10(min(shown)))
    last = max(math.ceil(math.log10(max(*shown, limit))), first + 1)
    stride = max((last - first) // 5, 1)
    powers = range(last, first - 1, -stride)
    ticks = tuple((10.0**power, f"1e{power}") for power in powers)

    def place(value: float) -> float:
        return math.log10(max(value, 10.0**first))

    return Axis(low=10.0**first, high=10.0**last, ticks=ticks, place=place)


def curve(
    values: Sequence[float],
    axis: Axis,
    *,
    name: str,
    limit: float | None = None,
    steps: Sequence[int] | None = None,
) -> str:
    """`values` over their steps as a line with points.

    Args:
        values: One for each step.
        axis: The vertical one.
        name: What is shown, for those who cannot see it and for the points' titles.
        limit: Drawn as a dashed line.
        steps: Number of each value's step, rising; None counts from 1.
    """
    numbers = steps if steps is not None else range(1, len(values) + 1)
    first, last = (numbers[0], numbers[-1]) if values else (1, 1)

    def x(step: int) -> float:
        return _LEFT + (step - first) / max(last - first, 1) * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BOTTOM - axis.share(value) * (_HEIGHT - _TOP - _BOTTOM)

    points = [(x(step), y(value)) for step, value in zip(numbers, values, strict=True)]
    parts = [
        f'<svg class="chart" role="img" aria-label="{escape(name)}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        *(_tick(y(value), label) for value, label in axis.ticks),
        *(_step_label(x(step), step) for step in _step_ticks(first, last)),
        f'<text class="soft" x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{_HEIGHT - 4}" '
        'text-anchor="middle">step</text>',
    ]
    if limit is not None:
        parts.append(
            f'<path class="limit" d="M{_LEFT} {y(limit):.1f}H{_WIDTH - _RIGHT}">'
            f"<title>{limit:g}</title></path>"
        )
    line = "L".join(f"{px:.1f} {py:.1f}" for px, py in points)
    parts.append(f'<path class="line" d="M{line}"/>')
    for step, (px, py), value in zip(numbers, points, values, strict=True):
        title = f"{name}, step {step}: {value:.3g}"
        parts.append(
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3"><title>{escape(title)}</title></circle>'
        )
    return "\n".join([*parts, "</svg>"])


def _tick(y: float, label: str) -> str:
    return (
        f'<path class="grid" d="M{_LEFT} {y:.1f}H{_WIDTH - _RIGHT}"/>'
        f'<text class="soft" x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>'
    )


def _step_label(x: float, step: int) -> str:
    return (
        f'<text class="soft" x="{x:.1f}" y="{_HEIGHT - _BOTTOM + 16}" '
        f'text-anchor="middle">{step}</text>'
    )


def _step_ticks(first: int, last: int) -> list[int]:
    stride = max(round((last - first + 1) / 8), 1)
    return list(range(first, last + 1, stride))
