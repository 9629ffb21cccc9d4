"""Pictures of an episode record: an SVG, a self-contained HTML page, a PNG."""

from harness_sdk.view.page import episode_html
from harness_sdk.view.png import episode_png
from harness_sdk.view.svg import episode_svg

__all__ = ["episode_html", "episode_png", "episode_svg"]
