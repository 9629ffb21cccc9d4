"""What every engine refuses before it computes: bad tokens, bad spans, positions past the model."""

from __future__ import annotations

from collections.abc import Sequence

from harness_sdk.control import MAX_PROBE_TOKENS
from harness_sdk.errors import AdapterError, BudgetExhausted, InvalidRequest
from rollout_service.cursors import Cursor
from rollout_service.engine.base import EngineInfo


def check_cursor(info: EngineInfo, cursor: Cursor, *, num_more: int = 0) -> int:
    """Refuse a cursor that the model cannot compute.

    Args:
        info: The engine's limits.
        cursor: The cursor about to be computed; without tokens only where more follow.
        num_more: Tokens that must fit after it.

    Returns:
        How many tokens fit after it.

    Raises:
        InvalidRequest: No tokens, a token outside the vocabulary, a span outside its source.
        BudgetExhausted: A rotary position or the visible length would pass the model's.
    """
    if cursor.token_ids or not num_more:
        check_token_ids(info, cursor.token_ids)
    for mount in cursor.mounts:
        if not 0 <= mount.begin < mount.end <= len(mount.source.token_ids):
            raise InvalidRequest(
                "mounted span lies outside its source",
                value=f"[{mount.begin}, {mount.end})",
                limit=f"[0, {len(mount.source.token_ids)})",
                remedy="mount tokens that the source has",
            )
    needed = max(cursor.next_position, cursor.num_visible) + num_more
    if needed > info.max_positions:
        raise BudgetExhausted(
            "prompt passes the model's positions",
            value=needed,
            limit=info.max_positions,
            remedy="rewind, mount less, or fork from an earlier step",
        )
    return info.max_positions - needed + num_more


def check_token_ids(info: EngineInfo, token_ids: Sequence[int]) -> None:
    """Refuse an empty run of tokens and tokens outside the vocabulary.

    Raises:
        InvalidRequest: `token_ids` is empty or names an unknown token.
    """
    if not token_ids:
        raise InvalidRequest(
            "no tokens to compute", value=0, limit="at least 1", remedy="append a message"
        )
    low, high = min(token_ids), max(token_ids)
    if low < 0 or high >= info.vocab_size:
        raise InvalidRequest(
            "token outside the vocabulary",
            value=low if low < 0 else high,
            limit=f"0 to {info.vocab_size - 1}",
            remedy="serve the tokenizer that belongs to the model",
        )


def check_probe(info: EngineInfo, token_ids: Sequence[int]) -> None:
    """Refuse a probe that turns would wait for, and one that the model cannot compute.

    Raises:
        InvalidRequest: Not 2 to `MAX_PROBE_TOKENS` tokens, more than the model has positions, or
            an unknown token.
    """
    longest = min(MAX_PROBE_TOKENS, info.max_positions)
    if not 2 <= len(token_ids) <= longest:
        raise InvalidRequest(
            "probe of too few or too many tokens",
            value=len(token_ids),
            limit=f"2 to {longest}",
            remedy="set the trainer's publish.probe_tokens within it",
        )
    check_token_ids(info, token_ids)


def check_version(version: int, loaded: Sequence[int]) -> None:
    """Refuse a policy version that is not loaded.

    Raises:
        AdapterError: `version` is not among `loaded`.
    """
    if version not in loaded:
        raise AdapterError(
            "policy version is not loaded",
            value=version,
            limit=", ".join(map(str, sorted(loaded))),
            remedy="load its adapter first",
        )
