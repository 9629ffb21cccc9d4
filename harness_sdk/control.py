"""Names and messages that the services share over Redis and MQTT (design.md sections 8 and 9).

Keys, topics and the two retained JSON messages; no client of either lives here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, cast

from harness_sdk.errors import ProtocolError

ADAPTER_CHUNK_BYTES = 4 * 1024 * 1024
"""An adapter travels through Redis in values of this size."""

MAX_ADAPTER_CONFIG_BYTES = 1 << 20
"""Largest `adapter_config.json`."""

MAX_PROBE_TOKENS = 1024
"""Longest probe of a version. Turns wait beside its passes: of a tiny model on a CPU core 0.1 to
0.2 s with these, 2 to 9 s with 25,000 tokens."""

RECORD_FIELD = "record"
"""Field of a stream entry that holds the record's bytes."""

FIGURES_FIELD = "figures"
"""Field of a step's entry: `step`, `time_s`, `objective` and the `area/name` figures, as JSON."""

ADAPTER_FILE = "adapter_model.safetensors"
"""PEFT's name of the tensors, here and in a shared directory."""

ADAPTER_CONFIG_FILE = "adapter_config.json"
"""PEFT's name of the adapter's configuration."""


def episodes_key(run: str) -> str:
    """Redis stream of finished episodes."""
    return f"octopus:{run}:episodes"


def dead_key(run: str) -> str:
    """Redis stream of records that failed to parse three times or were refused, newest kept."""
    return f"octopus:{run}:dead"


def steps_key(run: str) -> str:
    """Redis stream of what the trainer reported of each step, newest kept."""
    return f"octopus:{run}:steps"


def adapter_key(run: str, version: int) -> str:
    """Prefix of an adapter's keys: `:meta` (hash) and `:chunk:{i}` (bytes)."""
    return f"octopus:{run}:adapter:{version}"


def adapter_meta_key(run: str, version: int) -> str:
    """Redis hash: `num_chunks`, `num_bytes`, `sha256` (of the tensors' file), `config` (JSON)."""
    return f"{adapter_key(run, version)}:meta"


def adapter_chunk_key(run: str, version: int, index: int) -> str:
    """Redis value: bytes `[index * ADAPTER_CHUNK_BYTES, ...)` of the tensors' file."""
    return f"{adapter_key(run, version)}:chunk:{index}"


def trainer_key(run: str) -> str:
    """Redis value: id of the run folder that trains the run, and where it is."""
    return f"octopus:{run}:trainer"


def permits_key(run: str) -> str:
    """Redis hash: groups that the trainer has `granted` and `octopus run` has `taken`, how many it
    has `begun`, whose next is the next of the tasks, and what the trainer asks of them:
    `group_size`, and `refills`, the failed episodes that the runner replaces."""
    return f"octopus:{run}:permits"


def running_key(run: str) -> str:
    """Redis set: an id of each permit that a group holds, from taking it until the group's last
    episode has ended."""
    return f"{permits_key(run)}:running"


def permits_wake_key(run: str) -> str:
    """Redis list that gets one token at each grant, for a runner that waits with BLPOP."""
    return f"{permits_key(run)}:wake"


def policy_topic(run: str) -> str:
    """MQTT topic of the newest policy, retained."""
    return f"octopus/{run}/policy"


def replica_topic(run: str, replica_id: str) -> str:
    """MQTT topic of one replica's state, retained; `+` as id subscribes to all."""
    return f"octopus/{run}/replica/{replica_id}"


def echo_topic(run: str, client_id: str) -> str:
    """MQTT topic of a client that listens to itself: what it subscribed to before has come when
    its own message does."""
    return f"octopus/{run}/echo/{client_id}"


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyAnnouncement:
    """What the trainer publishes for each version."""

    version: int
    sha256: str
    """Of the safetensors file."""
    num_tensors: int
    rank: int
    alpha: float
    uri: str
    """`redis:octopus:{run}:adapter:{version}` or `file:///folder/of/the/adapter`."""
    base_model: str
    """Hash of the base model that the adapter belongs to."""
    probe_token_ids: tuple[int, ...]
    """2 to `MAX_PROBE_TOKENS`, and no more than the model has positions; replicas refuse others."""

    def to_json(self) -> str:
        """The retained payload."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, payload: str | bytes) -> PolicyAnnouncement:
        """Parse a payload.

        Raises:
            ProtocolError: The payload is no announcement.
        """
        data = _object(payload)
        try:
            data["probe_token_ids"] = tuple(data["probe_token_ids"])
            said = cls(**data)
            _check_texts(said.sha256, said.uri, said.base_model)
            _check_counts(said.version, said.num_tensors, said.rank, *said.probe_token_ids)
            _check_numbers(said.alpha)
            return said
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("not a policy announcement", value=payload[:200]) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaState:
    """What a replica retains about itself; `alive` is cleared by its last will."""

    replica_id: str
    alive: bool
    address: str = ""
    versions: tuple[int, ...] = ()
    checksums: Mapping[str, str] = field(default_factory=dict[str, str])
    """Of the newest version, read back from the buffers that serve: tensor name -> sha256."""
    probe_logprobs: tuple[float, ...] = ()
    """Nats, of `probe_token_ids[1:]` under the newest version."""
    error: str = ""
    """Why the newest announcement was refused; empty where it was applied."""
    error_version: int = 0
    """Version that `error` is about."""
    waiting_version: int = 0
    """Version that is here and waits for a slot; 0 where none does."""
    waiting_for: str = ""
    """What holds the slots."""
    waiting_s: float = 0.0
    """How long versions have waited when this was said, every few seconds anew."""

    def to_json(self) -> str:
        """The retained payload."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, payload: str | bytes) -> ReplicaState:
        """Parse a payload.

        Raises:
            ProtocolError: The payload is no replica state.
        """
        data = _object(payload)
        try:
            for name in ("versions", "probe_logprobs"):
                data[name] = tuple(data.get(name, ()))
            said = cls(**data)
            _check_texts(said.replica_id, said.address, said.error, said.waiting_for)
            _check_texts(*dict(said.checksums).values())
            _check_counts(*said.versions, said.error_version, said.waiting_version)
            _check_numbers(*said.probe_logprobs, said.waiting_s)
            if not isinstance(data["alive"], bool):
                raise TypeError("a truth value is expected")
            return said
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError("not a replica state", value=payload[:200]) from error


def _object(payload: str | bytes) -> dict[str, Any]:
    try:
        data: object = json.loads(payload)
    except (ValueError, RecursionError) as error:
        raise ProtocolError("control message is no JSON", value=payload[:200]) from error
    if not isinstance(data, dict):
        raise ProtocolError("control message is no JSON object", value=payload[:200])
    return cast("dict[str, Any]", data)


def _check_texts(*values: Any) -> None:
    if not all(isinstance(value, str) for value in values):
        raise TypeError("text is expected")


def _check_counts(*values: Any) -> None:
    # Records and LoRA tables hold them in 64 bits.
    if not all(type(value) is int and 0 <= value < 2**63 for value in values):
        raise TypeError("a whole number is expected")


def _check_numbers(*values: Any) -> None:
    if not all(type(value) in (int, float) for value in values):
        raise TypeError("a number is expected")
