"""Configuration: precedence, typed errors that name the key, masking, help."""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, SecretStr, model_validator

from harness_sdk.cli.settings import (
    add_config_arguments,
    load_config,
    parse_arguments,
    render_config,
)
from harness_sdk.errors import ConfigError


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class EngineSection(Section):
    max_num_seqs: int = Field(default=8, ge=1, le=4096, description="Sequences a batch.")
    device: Literal["cpu", "cuda"] = "cpu"
    ratio: float = 0.5
    warm: bool = False
    layers: tuple[int, ...] | None = (1, 2)


class StoreSection(Section):
    url: str = Field(default="", json_schema_extra={"env": "OCTOPUS_REDIS_URL"})
    auth_token: SecretStr | None = Field(default=None, json_schema_extra={"env": "OCTOPUS_TOKEN"})


class Settings(Section):
    run: str = "local"
    engine: EngineSection = EngineSection()
    store: StoreSection = StoreSection()

    @model_validator(mode="after")
    def _pairs(self) -> Settings:
        if self.engine.warm and self.engine.device == "cuda":
            raise ConfigError(
                "engine.warm does not go with engine.device", value="cuda", limit="cpu", remedy="x"
            )
        return self


def _load(
    overrides: Sequence[str] = (), text: str = "", tmp: Path | None = None, **environment: str
) -> Settings:
    path = None
    if tmp is not None:
        path = tmp / "run.toml"
        path.write_text(text)
    return load_config(Settings, path, overrides, environment)


def test_sources_override_each_other_in_order(tmp_path: Path) -> None:
    text = 'run = "file"\n[engine]\nmax_num_seqs = 3\nratio = 0.1\n[store]\nurl = "redis://file"\n'
    config = _load(
        ["--engine.max-num-seqs", "64"], text, tmp_path, OCTOPUS_REDIS_URL="redis://environment"
    )
    assert config.run == "file"
    assert (config.engine.max_num_seqs, config.engine.ratio, config.engine.device) == (
        64, 0.1, "cpu",
    )  # fmt: skip
    assert config.store.url == "redis://environment"
    flag = _load(["--store.url=redis://flag"], OCTOPUS_REDIS_URL="redis://environment")
    assert flag.store.url == "redis://flag"


def test_flags_convert_to_the_fields_type() -> None:
    config = _load(
        ["--engine.warm", "--engine.ratio=1e-3", "--engine.layers", "[4, 5]", "--run", "7"]
    )
    assert config.engine == EngineSection(warm=True, ratio=1e-3, layers=(4, 5))
    assert config.run == "7"
    assert _load(["--engine.layers", "none"]).engine.layers is None


@pytest.mark.parametrize(
    ("overrides", "message", "value", "limit", "remedy"),
    [
        (["--engine.max-num-seq", "1"], "unknown configuration key engine.max_num_seq", "'1'",
         "max_num_seqs", "did you mean engine.max_num_seqs?"),
        (["--zebra.x", "1"], "unknown configuration key zebra", "{'x': '1'}", "engine", "remove"),
        (["--engine.max-num-seqs", "many"], "engine.max_num_seqs is not valid", "'many'",
         "valid integer", "--engine.max-num-seqs"),
        (["--engine.max-num-seqs", "0"], "engine.max_num_seqs is not valid", "'0'",
         "greater than or equal to 1", "--engine.max-num-seqs"),
        (["--engine.device", "tpu"], "engine.device is not valid", "'tpu'", "'cpu' or 'cuda'",
         "--engine.device"),
        (["--engine.layers", "[1"], "--engine.layers is no TOML", "[1", "", ""),
        (["--run.x", "1", "--run.y", "2", "--run", "z", "--run.q", "1"], "run.q goes through run",
         "z", "", ""),
        (["--engine.warm", "--engine.device", "cuda"], "engine.warm does not go", "cuda", "cpu",
         "x"),
    ],
)  # fmt: skip
def test_bad_setting_is_an_error_naming_key_value_limit_remedy(
    overrides: list[str], message: str, value: str, limit: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        _load(overrides)
    error = caught.value
    assert message in error.message
    assert value in error.value
    assert limit in error.limit
    assert remedy in error.remedy


def test_bad_file_is_an_error_naming_the_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no TOML.*run\.toml"):
        _load(text="x = [", tmp=tmp_path)
    with pytest.raises(ConfigError, match=r"cannot read.*gone\.toml"):
        load_config(Settings, tmp_path / "gone.toml", (), {})


def test_wrong_secret_is_not_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        _load(["--store.auth-tokens", "hunter2", "--store.auth-token", "[1]"])
    assert "auth_tokens" in str(caught.value)
    with pytest.raises(ConfigError) as caught:
        _load(["--store.auth-token", "[411]"])
    assert "411" not in str(caught.value)


def test_rendered_config_loads_again_and_masks_secrets(tmp_path: Path) -> None:
    config = _load(
        ["--engine.layers", "none", "--run", 'a "quoted" \\ name', "--engine.ratio", "inf"],
        OCTOPUS_TOKEN="hunter2",
        OCTOPUS_REDIS_URL="redis://:pass@host:1/0",
    )
    toml, text = render_config(config), render_config(config, "json")
    assert "hunter2" not in toml + text
    assert ":pass@" not in toml + text
    assert "# layers is unset" in toml
    again = tomllib.loads(toml)
    assert again["run"] == config.run
    assert again["engine"]["ratio"] == float("inf")
    assert json.loads(text)["engine"]["layers"] is None
    path = tmp_path / "again.toml"
    path.write_text(toml)
    assert load_config(Settings, path, (), {}).engine.max_num_seqs == config.engine.max_num_seqs


def test_arguments_keep_known_options_and_collect_the_rest() -> None:
    parser = argparse.ArgumentParser()
    add_config_arguments(parser, Settings)
    parser.add_argument("folder")
    parser.add_argument("--port", type=int)
    args = parse_arguments(
        parser, ["--engine.warm", "--engine.max-num-seqs", "4", "here", "--port=3", "--dry-run"]
    )
    assert (args.folder, args.port, args.dry_run) == ("here", 3, "toml")
    assert args.overrides == ("--engine.warm", "--engine.max-num-seqs", "4")
    assert "--engine.max-num-seqs  Sequences a batch. (default 8)" in parser.format_help()
    assert "environment OCTOPUS_TOKEN" in parser.format_help()


def test_parser_without_settings_refuses_unknown_flags() -> None:
    with pytest.raises(SystemExit):
        parse_arguments(argparse.ArgumentParser(), ["--engine.warm"])
