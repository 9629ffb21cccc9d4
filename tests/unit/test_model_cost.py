"""What a token costs: against the models themselves, and by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness_sdk.errors import ConfigError
from harness_sdk.model_cost import ModelCost, model_cost, read_model_cost
from tests.tiny_models import FAMILIES, tiny_model
from tests.tiny_moe_models import MOE_FAMILIES, tiny_moe_model

ACTIVE_EXPERTS = 2 / 4


@pytest.mark.parametrize("family", [*FAMILIES, *MOE_FAMILIES])
def test_weights_are_those_of_the_models_matrices(family: str) -> None:
    model = tiny_model(family) if family in FAMILIES else tiny_moe_model(family)
    found = 0.0
    for name, parameter in model.named_parameters():
        if parameter.dim() < 2 or "embed" in name or "lm_head" in name:
            continue
        routed = parameter.dim() == 3 and ".experts." in name
        found += parameter.numel() * (ACTIVE_EXPERTS if routed else 1)
    cost = model_cost(model.config.to_dict())
    assert cost.weights == found
    assert cost.head_weights == model.get_output_embeddings().weight.numel()


def test_recurrent_states_cost_their_size() -> None:
    delta, ssd = (
        model_cost(tiny_model(f).config.to_dict()) for f in ("qwen3_5", "granitemoehybrid")
    )
    # Four layers of four heads of 12 x 16, three times; two layers of six heads of 16 x 16, twice.
    assert delta.recurrent == 4 * (6 * 4 * 12 * 16)
    assert ssd.recurrent == 2 * (4 * 6 * 16 * 16)
    assert (delta.attention_layers, ssd.attention_layers) == (2, 2)
    assert (delta.attention_width, ssd.attention_width) == (4 * 16, 4 * 12)


def test_a_run_of_tokens_costs_what_it_sees() -> None:
    cost = ModelCost(
        weights=100, head_weights=10, attention_layers=3, attention_width=8, recurrent=7
    )
    # Three tokens after five see 6, 7 and 8; four more mounted ones in one of the three layers.
    flops = cost.node_flops(
        num_tokens=3, num_sampled=2, num_before=5, num_mounted=4, num_mount_layers=1
    )
    assert flops == 3 * 207 + 2 * 20 + 32 * (3 * (6 + 7 + 8) + 3 * 4)


def test_cost_is_read_from_a_folder_or_a_file(tmp_path: Path) -> None:
    config = tiny_model("qwen3").config.to_dict()
    # A model that also sees has its language model's sizes in a section.
    text = json.dumps({"model_type": "outer", "text_config": config})
    (tmp_path / "config.json").write_text(text)
    assert read_model_cost(tmp_path) == read_model_cost(tmp_path / "config.json")
    assert read_model_cost(tmp_path) == model_cost(config)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "no model configuration there"),
        ("no json", "no model configuration there"),
        ('{"model_type": "gemma", "num_hidden_layers": 1}', "gemma without 'num_attention_heads'"),
        ('{"layer_types": ["sliding_attention"]}', "without 'sliding_attention'"),
    ],
)
def test_unknown_configuration_is_refused(tmp_path: Path, text: str | None, problem: str) -> None:
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ConfigError, match=problem):
        read_model_cost(tmp_path)
