"""The layers that read mounts: the rule, and what may be chosen instead."""

from __future__ import annotations

import pytest

from harness_sdk.errors import ConfigError
from rollout_service.engine.mount_layers import choose_mount_layers


@pytest.mark.parametrize(
    ("num_layers", "expected"),
    [
        (36, range(13, 22)),
        (30, range(11, 18)),
        (32, range(12, 20)),
        (4, [1]),
        (2, [0]),
        (1, [0]),
    ],
)
def test_pure_attention_reads_in_a_middle_quarter(num_layers: int, expected: range) -> None:
    layers = choose_mount_layers(range(num_layers), is_hybrid=False)
    assert layers == tuple(expected)


def test_hybrids_read_in_every_attention_layer() -> None:
    assert choose_mount_layers((3, 7, 11), is_hybrid=True) == (3, 7, 11)


def test_chosen_layers_are_checked_by_name() -> None:
    assert choose_mount_layers(range(8), is_hybrid=False, chosen=(7, 2, 2)) == (2, 7)
    with pytest.raises(ConfigError, match=r"without attention; got \[8\]; allowed: \[0, .*unset"):
        choose_mount_layers(range(8), is_hybrid=False, chosen=(2, 8))
    with pytest.raises(ConfigError, match=r"no mount layers.*allowed: at least one of \[3, 7\]"):
        choose_mount_layers((3, 7), is_hybrid=True, chosen=())
