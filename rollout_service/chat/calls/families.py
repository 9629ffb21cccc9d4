"""The families, and which of them a chat template teaches."""

from __future__ import annotations

from collections.abc import Mapping

from rollout_service.chat.calls.answer import Family
from rollout_service.chat.calls.deepseek import DEEPSEEK
from rollout_service.chat.calls.dsml import DSML
from rollout_service.chat.calls.glm import GLM
from rollout_service.chat.calls.granite import GRANITE
from rollout_service.chat.calls.harmony import HARMONY
from rollout_service.chat.calls.hermes import HERMES
from rollout_service.chat.calls.kimi_k2 import KIMI_K2
from rollout_service.chat.calls.llama_json import LLAMA_JSON
from rollout_service.chat.calls.mistral import MISTRAL
from rollout_service.chat.calls.pythonic import PYTHONIC
from rollout_service.chat.calls.qwen_xml import QWEN_XML

# Hermes' tag is a part of other families' calls too, so that it is asked for last.
_ORDER = (
    HARMONY,
    KIMI_K2,
    DSML,
    DEEPSEEK,
    MISTRAL,
    GLM,
    QWEN_XML,
    GRANITE,
    PYTHONIC,
    LLAMA_JSON,
    HERMES,
)

FAMILIES: Mapping[str, Family] = {family.name: family for family in _ORDER}
"""By name, in the order in which a template's text is searched for their markers."""


def family_of(template_text: str) -> str:
    """Name of the family that a chat template teaches; `hermes` where it teaches none."""
    for family in FAMILIES.values():
        if any(marker in template_text for marker in family.taught_by):
            return family.name
    return HERMES.name


def opens_reasoning(generation_prompt: str, *, family: str) -> bool:
    """Whether a turn begins inside reasoning, because its generation prompt opened it."""
    tags = FAMILIES[family].reasoning.items()
    return any(
        generation_prompt.rfind(opening) > generation_prompt.rfind(closing)
        for opening, closing in tags
    )
