"""Which layers read mounted spans: one rule for every engine (design.md section 4)."""

from __future__ import annotations

from collections.abc import Sequence

from harness_sdk.errors import ConfigError


def choose_mount_layers(
    attention_layers: Sequence[int], *, is_hybrid: bool, chosen: Sequence[int] | None = None
) -> tuple[int, ...]:
    """Decoder layers that read mounts, in order.

    Recurrent layers keep a branch's identity, so all attention layers of a hybrid read; of a model
    of attention alone a middle quarter does, and the rest keeps it (Octopus, Appendix C).

    Args:
        attention_layers: The model's layers of full attention, in order.
        is_hybrid: Whether it has recurrent layers too.
        chosen: The configuration's `mount_layers`; None takes the rule above.

    Raises:
        ConfigError: `chosen` is empty or names a layer without attention.
    """
    if chosen is None:
        if is_hybrid:
            return tuple(attention_layers)
        first = 3 * len(attention_layers) // 8
        return tuple(attention_layers[first : first + max(len(attention_layers) // 4, 1)])
    if not chosen:
        raise ConfigError(
            "no mount layers: nothing that is read could be seen",
            value="none",
            limit=f"at least one of {list(attention_layers)}",
            remedy="leave mount_layers unset for the family's rule",
        )
    unknown = sorted(set(chosen) - set(attention_layers))
    if unknown:
        raise ConfigError(
            "mount layers without attention",
            value=unknown,
            limit=list(attention_layers),
            remedy="name layers among these in mount_layers, or leave it unset",
        )
    return tuple(sorted(set(chosen)))
