"""Configuration of the services: defaults < one TOML file < environment < dotted flags.

The environment holds addresses and secrets alone: a field names its variable with
`Field(json_schema_extra={"env": "OCTOPUS_REDIS_URL"})`, and `OCTOPUS_REDIS_URL_FILE` may name a
file that holds it. Secrets are `SecretStr` and print masked.
Takes the pydantic class as an argument, so that importing this costs the standard library only.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args

from harness_sdk.cli.environment import ENVIRONMENT, variable
from harness_sdk.errors import ConfigError
from harness_sdk.json_values import is_array, is_object
from harness_sdk.masking import MASK, SECRET_KEY, masked, masked_url

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError
    from pydantic.fields import FieldInfo

    Model = TypeVar("Model", bound=BaseModel)

FORMS = ("toml", "json")
"""What `--dry-run` can print."""


def add_config_arguments(
    parser: argparse.ArgumentParser, model_class: type[BaseModel] | None = None
) -> None:
    """Give `parser` `--config`, `--dry-run` and dotted flags for every configuration key.

    Args:
        parser: Parser of a command; parse with `parse_arguments`.
        model_class: Configuration whose keys `--help` lists; None lists none.
    """
    add_file_arguments(parser)
    parser.set_defaults(overrides=())
    if model_class is not None:
        parser.formatter_class = argparse.RawDescriptionHelpFormatter
        parser.epilog = "settings:\n" + "\n".join(_reference(model_class))


def add_file_arguments(parser: argparse.ArgumentParser) -> None:
    """Give `parser` `--config` and `--dry-run` alone."""
    parser.add_argument("--config", type=Path, metavar="FILE", help="TOML file of settings")
    parser.add_argument(
        "--dry-run",
        nargs="?",
        const="toml",
        choices=FORMS,
        help="print the resolved configuration, secrets masked, and exit",
    )


def json_object(text: str) -> dict[str, Any]:
    """A flag's value that is a JSON object; for `type=`.

    Raises:
        ArgumentTypeError: It is none.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is no JSON: {error}") from error
    if not is_object(value):
        raise argparse.ArgumentTypeError(f'{text[:80]!r} is no JSON object, as {{"a": 1}}')
    return value


def parse_arguments(parser: argparse.ArgumentParser, argv: Sequence[str]) -> argparse.Namespace:
    """Parse `argv`; the flags that `parser` does not know become `overrides`.

    Only where `add_config_arguments` was called; elsewhere this is `parser.parse_args`.
    """
    if parser.get_default("overrides") is None:
        return parser.parse_args(argv)
    known: list[str] = []
    overrides: list[str] = []
    rest = list(argv)
    while rest:
        word = rest.pop(0)
        if word == "--" or not word.startswith("--") or _is_option(parser, word):
            known.append(word)
            continue
        overrides.append(word)
        if "=" not in word and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    args = parser.parse_args(known)
    args.overrides = tuple(overrides)
    return args


def load_config(
    model_class: type[Model],
    path: Path | None = None,
    overrides: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
) -> Model:
    """Resolve a configuration.

    Args:
        model_class: Frozen pydantic model, extra keys forbidden, nested by component.
        path: TOML file; None reads none.
        overrides: Dotted flags, `--engine.max-num-seqs 64` or `--engine.max-num-seqs=64`; dashes
            are underscores, a flag without a value is true, `none` unsets.
        environment: Variables to read; None takes the process's own.

    Raises:
        ConfigError: A file that does not parse, an unknown key, a value of the wrong type or out
            of bounds, or a pair of options that do not go together.
    """
    data = read_toml(path) if path is not None else {}
    for key, field in _leaves(model_class):
        name = _env_name(field)
        value = variable(name, environment) if name else None
        if value:
            _assign(data, key.split("."), value)
    for key, text in _pairs(overrides):
        _assign(data, key.split("."), _flag_value(model_class, key, text))
    return validate_config(model_class, data)


def validate_config(model_class: type[Model], data: Mapping[str, Any]) -> Model:
    """A configuration from nested tables alone.

    Raises:
        ConfigError: As `load_config` does.
    """
    from pydantic import ValidationError

    _check_keys(model_class, data, ())
    try:
        return model_class.model_validate(data)
    except ValidationError as error:
        raise _config_error(error) from error


def render_config(model: BaseModel, form: str = "toml") -> str:
    """The resolved configuration as `toml` or `json` text; secrets and URL passwords masked."""
    return render_masked(model.model_dump(mode="json"), form)


def render_masked(data: Mapping[str, Any], form: str = "toml") -> str:
    """Nested tables of plain values as `toml` or `json` text; secrets and URL passwords masked."""
    shown = masked(dict(data))
    return json.dumps(shown, indent=2) + "\n" if form == "json" else render_toml(shown)


def render_toml(data: Mapping[str, Any]) -> str:
    """Nested tables of plain values as a TOML file; None becomes a comment."""
    return "\n".join(_toml_lines(data, ())).strip() + "\n"


def _is_option(parser: argparse.ArgumentParser, word: str) -> bool:
    return word.split("=", 1)[0] in parser._option_string_actions


def read_toml(path: Path) -> dict[str, Any]:
    """The tables of a TOML file.

    Raises:
        ConfigError: It cannot be read, or is no TOML.
    """
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(
            "cannot read the configuration file",
            value=path,
            remedy=f"{error.strerror}: give an existing file to --config",
        ) from error
    except ValueError as error:
        raise ConfigError(
            "the configuration file is no TOML", value=path, remedy=str(error)
        ) from error


def _pairs(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    words = list(overrides)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            raise ConfigError(
                "stray word among the flags", value=word, remedy="write --section.key value"
            )
        key, found, text = word[2:].partition("=")
        if not found:
            text = words.pop(0) if words and not words[0].startswith("--") else "true"
        yield key.replace("-", "_"), text


def _flag_value(model_class: type[BaseModel], key: str, text: str) -> Any:
    """Scalars stay text, which pydantic converts; arrays and tables are TOML."""
    field = dict(_leaves(model_class)).get(key)
    if field is not None and text == "none" and type(None) in get_args(field.annotation):
        return None
    if text[:1] not in ("[", "{"):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except ValueError as error:
        raise ConfigError(f"--{key} is no TOML value", value=text, remedy=str(error)) from error


def _assign(data: dict[str, Any], parts: Sequence[str], value: Any) -> None:
    for part in parts[:-1]:
        child = data.setdefault(part, {})
        if not is_object(child):
            raise ConfigError(
                f"{'.'.join(parts)} goes through {part}, which is no section",
                value=child,
                remedy=f"remove {part}, or the keys below it",
            )
        data = child
    data[parts[-1]] = value


def _section(field: FieldInfo) -> type[BaseModel] | None:
    """The model behind a field that is a section, `X` or `X | None`."""
    for kind in (field.annotation, *get_args(field.annotation)):
        if isinstance(kind, type) and hasattr(kind, "model_fields"):
            return kind
    return None


def _leaves(model_class: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model_class.model_fields.items():
        section = _section(field)
        if section is None:
            yield prefix + name, field
        else:
            yield from _leaves(section, f"{prefix}{name}.")


def _env_name(field: FieldInfo) -> str:
    extra = field.json_schema_extra
    name = str(extra.get("env", "")) if is_object(extra) else ""
    assert not name or name in ENVIRONMENT, f"{name} is no address or secret we read"
    return name


def _check_keys(model_class: type[BaseModel], data: Mapping[str, Any], at: tuple[str, ...]) -> None:
    fields = model_class.model_fields
    for name, value in data.items():
        if name not in fields:
            raise unknown_key(list(fields), (*at, name), value)
        section = _section(fields[name])
        if section is not None and is_object(value):
            _check_keys(section, value, (*at, name))


def unknown_key(names: Sequence[str], at: tuple[str, ...], value: Any) -> ConfigError:
    """The error for the key at the path `at`, whose section has the keys `names`."""
    close = difflib.get_close_matches(at[-1], names, n=1, cutoff=0.5)
    key = ".".join(at)
    remedy = f"did you mean {'.'.join((*at[:-1], close[0]))}?" if close else "remove the key"
    return ConfigError(
        f"unknown configuration key {key}",
        value=shown(key, value),
        limit=", ".join(names),
        remedy=remedy,
    )


def _config_error(error: ValidationError) -> ConfigError:
    """The first fault of a validation, as one of ours."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    cause = (first.get("ctx") or {}).get("error")
    if isinstance(cause, ConfigError):
        return cause
    if first["type"] == "missing":
        flag = f"--{key.replace('_', '-')}"
        return ConfigError(f"{key} is not set", remedy=f"set it in the file or with {flag}")
    return ConfigError(
        f"{key or 'the configuration'} is not valid",
        value=shown(key, first["input"]),
        limit=first["msg"].removeprefix("Input should be ").removeprefix("Value error, "),
        remedy=f"change {key} in the file or with --{key.replace('_', '-')}" if key else "",
    )


def shown(key: str, value: Any) -> str:
    """A key's value for an error, masked where it is a secret."""
    if SECRET_KEY.search(key):
        return repr(MASK)
    return repr(masked_url(value) if isinstance(value, str) else value)


def _toml_lines(data: Mapping[str, Any], at: tuple[str, ...]) -> Iterator[str]:
    tables = {key: value for key, value in data.items() if is_object(value)}
    if at and len(tables) < len(data):
        yield f"\n[{'.'.join(map(_toml_key, at))}]"
    for key, value in data.items():
        if key not in tables:
            # TOML has no null: an unset key is shown as a comment.
            unset = value is None
            yield f"# {key} is unset" if unset else f"{_toml_key(key)} = {_toml_value(value)}"
    for key, value in tables.items():
        yield from _toml_lines(value, (*at, key))


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: Any) -> str:
    if is_array(value):
        return "[" + ", ".join(_toml_value(item) for item in value) + "]"
    if is_object(value):
        pairs = (f"{_toml_key(key)} = {_toml_value(item)}" for key, item in value.items())
        return "{" + ", ".join(pairs) + "}"
    if isinstance(value, float):
        return repr(value)
    # JSON's strings, numbers and booleans are TOML's too, but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _reference(model_class: type[BaseModel]) -> Iterator[str]:
    for key, field in _leaves(model_class):
        notes: list[str] = []
        if field.is_required():
            notes.append("required")
        elif field.default_factory is None:
            notes.append(f"default {field.get_default()}")
        if _env_name(field):
            notes.append(f"environment {_env_name(field)}")
        text = " ".join((field.description or "").split())
        suffix = f" ({', '.join(notes)})" if notes else ""
        yield f"  --{key.replace('_', '-')}  {text}{suffix}"
