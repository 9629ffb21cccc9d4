"""Mutated records, chat templates and configurations: each is taken, or refused by its type."""

from __future__ import annotations

import copy
import json
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from pydantic import BaseModel

from harness_sdk.cli.demo.config import DemoConfig
from harness_sdk.cli.run_config import RunConfig
from harness_sdk.cli.settings import load_config, render_config
from harness_sdk.cli.stack_config import StackConfig
from harness_sdk.cli.watch.episodes import read_entry
from harness_sdk.cli.watch.panes import episode_rows
from harness_sdk.errors import ConfigError, HarnessError, ProtocolError
from harness_sdk.measures import measure
from harness_sdk.record import record_from_bytes, record_to_bytes
from harness_sdk.rpc.v1 import record_pb2
from rollout_service.chat import Template
from rollout_service.chat.proof import probe
from rollout_service.config import RolloutConfig
from tests.chat_tokenizers import SPECIAL_TOKENS, TEMPLATES
from tests.fuzz.messages import any_value, broken, draw
from tests.random_records import random_record
from trainer_service.config import TrainerConfig
from trainer_service.dag import pack_episodes
from trainer_service.origin import Origin
from trainer_service.parsing import parse_record

LIMIT_S = 10.0
"""Longest that the processor may work on one input: a busy machine takes none of it."""
_PROBE_S = 0.5

CONFIGS: tuple[type[BaseModel], ...] = (
    RolloutConfig, TrainerConfig, StackConfig, RunConfig, DemoConfig,
)  # fmt: skip


_BASE: dict[type[BaseModel], dict[str, Any]] = {
    RolloutConfig: {"model": {"path": "m"}},
    TrainerConfig: {"model": {"path": "m"}},
    StackConfig: {"model": "m"},
}


@dataclass
class Outcome:
    """What inputs of one kind came to."""

    tried: int = 0
    taken: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return (
            f"{self.tried} tried: {self.taken} taken, {self.refused.total()} refused "
            f"{dict(self.refused.most_common(6))}, {len(self.faults)} faults"
        )


def fuzz_inputs(
    check: Callable[[random.Random], str], seed: int, count: int, *, until_s: float | None = None
) -> Outcome:
    """Try `count` inputs.

    Args:
        check: Makes one and tries it; returns why it was refused, "" where it was taken.
        seed: Each input is drawn from it and its number alone.
        count: Inputs.
        until_s: End of `time.monotonic` past which no further one is begun.
    """
    outcome = Outcome()
    for number in range(count):
        if until_s is not None and time.monotonic() > until_s:
            break
        began_s = time.process_time()
        outcome.tried += 1
        try:
            reason = check(random.Random(f"{seed} {number}"))
        except Exception as error:
            outcome.faults.append(f"{seed} {number}: {type(error).__name__}: {error}"[:400])
            continue
        outcome.taken += not reason
        outcome.refused.update([reason] if reason else [])
        took_s = time.process_time() - began_s
        if took_s > LIMIT_S:
            outcome.faults.append(f"{seed} {number}: {took_s:.1f} s")
    return outcome


# Records


def check_record(rng: random.Random) -> str:
    """A record that was changed: refused as the stream expects it, or fit for a step."""
    data = _changed_record(rng)
    # The live page shows whatever is in the stream.
    row, _ = read_entry("1-0", data)
    episode_rows([row])
    try:
        record = parse_record(data, Origin())
    except (ProtocolError, ValueError) as error:
        assert str(error), type(error)
        return type(error).__name__
    assert record_to_bytes(record_from_bytes(record_to_bytes(record))) == record_to_bytes(record)
    if record.num_tokens:
        measure(record)
        strip = pack_episodes([record])
        assert strip.token_ids.shape == strip.position_ids.shape
        assert bool((strip.action_target >= 0).all())
    return ""


@cache
def _good_record(number: int) -> bytes:
    rng = np.random.default_rng(number)
    return record_to_bytes(random_record(rng, 300, num_events=1 + number % 8))


def _changed_record(rng: random.Random) -> bytes:
    data = _good_record(rng.randrange(40))
    if rng.random() < 0.3:
        return broken(rng, data)
    proto = record_pb2.EpisodeRecord.FromString(data)
    for _ in range(rng.choice((1, 1, 1, 2, 5))):
        _change(rng, rng.choice((proto, *proto.nodes, *proto.nodes, *proto.threads)))
    return proto.SerializeToString()


def _change(rng: random.Random, message: Any) -> None:
    """Another value, one more, one less, or another order in one field."""
    field = rng.choice(message.DESCRIPTOR.fields)
    if not field.is_repeated:
        setattr(message, field.name, any_value(rng, field))
        return
    values = list(getattr(message, field.name))
    kind = rng.randrange(5)
    if kind == 0 or not values:
        one = any_value if field.message_type is None else _any_message
        values.insert(rng.randrange(len(values) + 1), one(rng, field))
    elif kind == 1:
        values.pop(rng.randrange(len(values)))
    elif kind == 2:
        values.append(rng.choice(values))
    elif kind == 3:
        rng.shuffle(values)
    elif field.message_type is None:
        values[rng.randrange(len(values))] = any_value(rng, field)
    else:
        _change(rng, rng.choice(values))
    message.ClearField(field.name)
    getattr(message, field.name).extend(values)


def _any_message(rng: random.Random, field: Any) -> Any:
    return draw(rng, field.message_type, lambda *_: None, 1.0)


# Templates


_PIECES = (
    "{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{{ m.content }}",
    "{% if tools %}", "{% else %}", "{% endif %}", "{{ raise_exception('no') }}", "{{ 1 // 0 }}",
    "{% set x = x %}",
    "{{ m['content'] | trim }}", "{{ messages[-1].content[:-1] }}", "{{ 'x' * 10 ** 9 }}",
    "{% for i in range(99999) %}{{ i }}{% endfor %}", "{{ tools | tojson(indent=9999) }}",
    "{% macro m(x) %}{{ m(x) }}{% endmacro %}{{ m(1) }}", "{{ strftime_now('%Y') }}",
    "{{ x.y.z }}",
    "{{ ''.__class__.__mro__ }}", "{% include 'x' %}", "{% import os %}", "\ud800", "{{", "%}",
    "{#",
    "{{ messages | map('upper') | list }}", "{% generation %}", "{{ loop }}", "{{ self }}",
    "{{ add_generation_prompt }}", "{{ messages.append(messages) }}{{ messages }}", "{%- raw %}",
    "{{ range(10 ** 12) }}", "{{ cycler('a') }}", "{{ bos_token }}", "{{ lipsum() }}",
    "{% set ns = namespace(a=1) %}{% set ns.a = ns %}{{ ns.a }}", "{{ messages | sum }}", "\0",
)  # fmt: skip


def check_template(rng: random.Random) -> str:
    """A chat template that was changed: the probe serves it or refuses it, and soon."""
    source = _changed_template(rng)
    try:
        probe(Template(source, SPECIAL_TOKENS), limit_s=_PROBE_S)
    except HarnessError as error:
        assert error.remedy and error.status == "INVALID_ARGUMENT", error
        return type(error).__name__
    return ""


@cache
def _templates() -> tuple[str, ...]:
    return tuple(path.read_text("utf-8") for path in sorted(TEMPLATES.glob("*.jinja")))


def _changed_template(rng: random.Random) -> str:
    text = rng.choice(_templates())
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(len(text) + 1)
        end = min(len(text), at + rng.choice((0, 0, 1, 5, 80)))
        if rng.random() < 0.7:
            # Between two pieces of jinja, where what is put in compiles.
            at = end = max(text.rfind("%}", 0, at) + 2, text.rfind("}}", 0, at) + 2, 0)
        kind = rng.choice((0, 0, 0, 1, 2, 3))
        if kind == 0:
            text = text[:at] + rng.choice(_PIECES) + text[end:]
        elif kind == 1:
            text = text[:at] + text[end:]
        elif kind == 2:
            other = rng.choice(_templates())
            start = rng.randrange(len(other))
            text = text[:at] + other[start : start + rng.randrange(200)] + text[end:]
        else:
            text = text[:at] + rng.choice("{}%()[]'\"|-+*~ \n") + text[at:]
    return text


# Configurations


_VALUES: tuple[Any, ...] = (
    0, 1, -1, 2, 10**30, -(10**30), 0.5, 1e400, -1.0, float("nan"), True, False, "", "x", "none",
    "true", "\0", "é", "../x", "redis://h:1/0", "redis://u:p@h", "http://", "mqtt://h", "cpu",
    "cuda:9", "transformers", "vllm", "[", "{", "[1, 2", "{a = 1}", "x" * 5000, [], [1], ["a"],
    [[[]]], {}, {"a": {}},
)  # fmt: skip


def check_config(rng: random.Random) -> str:
    """A file, variables and flags: they make a configuration that prints and reads back, or not."""
    model_class = rng.choice(CONFIGS)
    # What the services cannot do without, most often.
    data: dict[str, Any] = copy.deepcopy(_BASE.get(model_class, {})) if rng.random() < 0.9 else {}
    for _ in range(rng.randrange(3)):
        _put(data, _key(rng, model_class), _value(rng))
    flags: list[str] = []
    for _ in range(rng.randrange(3)):
        dotted = "--" + ".".join(_key(rng, model_class)).replace("_", "-")
        words = ([dotted], [dotted, str(_value(rng))], [f"{dotted}={_value(rng)}"])
        flags += rng.choice(words)
    variables = {"OCTOPUS_REDIS_URL": str(_value(rng))} if rng.random() < 0.1 else {}
    with TemporaryDirectory() as folder:
        path = Path(folder) / "run.toml"
        path.write_bytes(_toml(rng, data))
        try:
            config = load_config(model_class, path, flags, variables)
        except ConfigError as error:
            assert error.remedy or error.limit, error
            return str(error).partition(" ")[0] if "unknown" in str(error) else "ConfigError"
        for form in ("toml", "json"):
            render_config(config, form)
        path.write_text(render_config(config), "utf-8")
        if "***" not in path.read_text("utf-8"):
            again = load_config(model_class, path, (), {})
            assert render_config(again) == render_config(config)
    return ""


def _key(rng: random.Random, model_class: type[BaseModel]) -> tuple[str, ...]:
    """The path of a key that exists, now and then misspelt or too deep."""
    name = rng.choice(sorted(model_class.model_fields))
    kind = model_class.model_fields[name].annotation
    below = _key(rng, kind) if isinstance(kind, type) and issubclass(kind, BaseModel) else ()
    found = (name, *below) if rng.random() < 0.95 else (name,)
    if rng.random() < 0.05:
        return (*found, "more")
    return (*found[:-1], found[-1] + rng.choice("sx_")) if rng.random() < 0.05 else found


def _value(rng: random.Random) -> Any:
    return copy.deepcopy(rng.choice(_VALUES))


def _put(data: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    for part in path[:-1]:
        child = data.get(part)
        data[part] = data = child if isinstance(child, dict) else {}
    data[path[-1]] = value


def _toml(rng: random.Random, data: dict[str, Any]) -> bytes:
    """The tables as a file; a few are cut, flipped, or of another encoding."""
    lines = [f"{json.dumps(key)} = {_inline(value)}" for key, value in data.items()]
    text = "\n".join(lines).encode("utf-8", "surrogatepass")
    return broken(rng, text) if rng.random() < 0.1 else text


def _inline(value: Any) -> str:
    if isinstance(value, dict):
        pairs = (f"{json.dumps(key)} = {_inline(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_inline, value)) + "]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    return str(value).lower()


KINDS: dict[str, Callable[[random.Random], str]] = {
    "records": check_record,
    "templates": check_template,
    "configs": check_config,
}
