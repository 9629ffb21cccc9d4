"""Which process of a trainer this is: torchrun's variables, all of them or none."""

from __future__ import annotations

import pytest

from harness_sdk.cli.__main__ import main
from harness_sdk.errors import ConfigError
from trainer_service.launch import place


@pytest.mark.parametrize(
    ("variables", "wanted"),
    [
        ({}, (0, 1)),
        ({"WORLD_SIZE": "1"}, (0, 1)),
        ({"RANK": "0", "WORLD_SIZE": "1"}, (0, 1)),
        ({"RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
    ],
)
def test_place_is_what_torchrun_says(variables: dict[str, str], wanted: tuple[int, int]) -> None:
    assert place(variables) == wanted


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "1"}, "RANK is set and WORLD_SIZE is not.*got RANK=1.*torchrun, or unset RANK"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE is set and RANK is not.*unset WORLD_SIZE"),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK=2, WORLD_SIZE=2"),
        ({"RANK": "one", "WORLD_SIZE": "2"}, "RANK=one"),
    ],
)
def test_variables_that_name_no_place_are_refused(variables: dict[str, str], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        place(variables)


def test_a_stray_rank_makes_no_follower(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert main(["trainer", "--model.path", "nowhere"]) == 1
    assert "RANK is set and WORLD_SIZE is not" in capsys.readouterr().err
