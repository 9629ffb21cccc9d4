"""Objectives by name; each file holds one."""

from trainer_service.objectives import dag_grpo, path_average, sft, token_unique
from trainer_service.objectives.base import (
    Objective,
    ObjectiveOptions,
    ObjectiveOutput,
    PackedLogprobs,
)

OBJECTIVES: dict[str, Objective] = {
    "dag_grpo": dag_grpo.loss,
    "path_average": path_average.loss,
    "token_unique": token_unique.loss,
    "sft": sft.loss,
}

__all__ = ["OBJECTIVES", "Objective", "ObjectiveOptions", "ObjectiveOutput", "PackedLogprobs"]
