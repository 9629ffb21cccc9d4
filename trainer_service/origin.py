"""What a run's records were made with: one tokenizer and one template, or they are refused.

Token ids of another tokenizer are other words to the model, and no loss or gradient shows it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from harness_sdk.errors import ConfigError
from harness_sdk.record import BYTES_HASH, EpisodeRecord

_SHA256 = re.compile(r"[0-9a-f]{64}")


class RefusedRecord(ConfigError):
    """A sound record that the run must not train on.

    Attributes:
        cause: Word for the count of what was dropped.
    """

    def __init__(self, message: str, *, cause: str = "", **context: Any) -> None:
        super().__init__(message, **context)
        self.cause = cause


class Origin:
    """The tokenizer and the template of a run, as far as they are known.

    Imported records may name neither, or the tokenizer by the name of a model: such are taken,
    and checked against the size of the vocabulary alone.

    Args:
        tokenizer_hashes: Of the trainer's own model folder; where there are none, the first
            record decides. The template is always the first record's: a replica's preamble is
            part of it. A restarted trainer begins anew.
    """

    def __init__(self, tokenizer_hashes: Collection[str] = ()) -> None:
        self._tokenizers = frozenset(tokenizer_hashes)
        self._template = ""
        self._whose_tokenizer = "the trainer's model folder has"
        self._whose_template = ""

    @classmethod
    def of_folder(cls, folder: Path) -> Origin:
        """Of the `tokenizer.json` in a model folder."""
        return cls(tokenizer_hashes(folder))

    def check(self, record: EpisodeRecord) -> None:
        """Refuse `record` where it was made with something else.

        Raises:
            RefusedRecord: With both hashes and what to do.
        """
        tokenizer, template = record.tokenizer_hash, record.template_hash
        if _is_known(tokenizer) and self._tokenizers and tokenizer not in self._tokenizers:
            raise RefusedRecord(
                f"episode {record.episode_id} was made with another tokenizer",
                cause="other_tokenizer",
                value=f"{tokenizer}{_by(record)}",
                limit=f"{' or '.join(sorted(self._tokenizers))}, which {self._whose_tokenizer}",
                remedy="give rollout and trainer the same model folder, tokenizer.json included",
                episode_id=record.episode_id,
            )
        if _is_known(template) and self._template and template != self._template:
            raise RefusedRecord(
                f"episode {record.episode_id} was made with another chat template",
                cause="other_template",
                value=f"{template}{_by(record)}",
                limit=f"{self._template}, which {self._whose_template}",
                remedy="give every replica the same release, model.preamble and "
                "model.template_variables; a run whose template was changed on purpose goes on "
                "after a restart of the trainer",
                episode_id=record.episode_id,
            )
        whose = f"episode {record.episode_id}{_by(record)} has"
        if _is_known(tokenizer) and not self._tokenizers:
            self._tokenizers, self._whose_tokenizer = frozenset({tokenizer}), whose
        if _is_known(template) and not self._template:
            self._template, self._whose_template = template, whose


def tokenizer_hashes(folder: Path) -> frozenset[str]:
    """What records call the tokenizer of a model folder; empty where it holds none.

    The rollout service hashes the file, `octopus trees` what the tokenizer writes of itself.
    """
    path = folder / "tokenizer.json"
    if not path.is_file():
        return frozenset()
    data = path.read_bytes()
    found = {hashlib.sha256(data).hexdigest()}
    from tokenizers import Tokenizer

    try:
        written = Tokenizer.from_buffer(data).to_str()
    except Exception:  # tokenizers raises bare Exception for a file of another kind
        return frozenset(found)
    return frozenset({*found, hashlib.sha256(written.encode()).hexdigest()})


def _is_known(fingerprint: str) -> bool:
    return fingerprint == BYTES_HASH or _SHA256.fullmatch(fingerprint) is not None


def _by(record: EpisodeRecord) -> str:
    return f" by {record.replica_id}" if record.replica_id else ""
