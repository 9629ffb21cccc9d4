"""Secrets: from files, never on a command line, never shown; and logs that nobody else writes."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest

from harness_sdk.cli.__main__ import main
from harness_sdk.cli.environment import refuse_secrets, variable
from harness_sdk.cli.logs import PrintableFormatter
from harness_sdk.cli.settings import load_config, render_config
from harness_sdk.errors import ConfigError
from harness_sdk.masking import masked_url
from harness_sdk.printable import printable
from rollout_service.config import RolloutConfig

FORGED = "x\r\n2026-01-01 00:00:00,000 ERROR root forged\x1b[2J\x9b31m\u2028\u202edone"


def test_a_secret_comes_from_the_file_that_the_environment_names(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("hunter2\n")
    (tmp_path / "redis").write_text("rediss://rollout:pw@valkey:6379/0\n")
    environment = {
        "OCTOPUS_TOKEN_FILE": str(tmp_path / "token"),
        "OCTOPUS_REDIS_URL_FILE": str(tmp_path / "redis"),
    }
    config = load_config(RolloutConfig, None, ["--model.path", "m"], environment)
    assert config.server.token is not None
    assert config.server.token.get_secret_value() == "hunter2"
    assert config.redis.url == "rediss://rollout:pw@valkey:6379/0"
    shown = render_config(config)
    assert "hunter2" not in shown and ":pw@" not in shown


def test_a_file_that_holds_no_secret_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "token"
    environment = {"OCTOPUS_TOKEN_FILE": str(path)}
    with pytest.raises(ConfigError, match="No such file"):
        variable("OCTOPUS_TOKEN", environment)
    for data in (b"", b" \n", b"x" * (64 * 1024 + 1)):
        path.write_bytes(data)
        with pytest.raises(ConfigError, match="holds no secret"):
            variable("OCTOPUS_TOKEN", environment)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="no UTF-8"):
        variable("OCTOPUS_TOKEN", environment)
    with pytest.raises(ConfigError, match="both set") as caught:
        variable("OCTOPUS_TOKEN", {**environment, "OCTOPUS_TOKEN": "hunter2"})
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize(
    "words",
    [
        ["rollout", "--server.token", "hunter2"],
        ["rollout", "--server.token=hunter2"],
        ["run", "agent", "--token", "hunter2"],
        ["trainer", "--redis.url", "rediss://u:hunter2@h:1"],
        ["status", "--redis-url=redis://:hunter2@h"],
        ["watch", "--mqtt-url", "mqtts://u:hunter2@h"],
    ],
)
def test_no_command_takes_a_secret_in_its_arguments(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 1
    told = capsys.readouterr().err
    assert "_FILE" in told and "hunter2" not in told


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--days", "-5"),
        ("--days", "0"),
        ("--days", "99999999999"),
        ("--run", ""),
        ("--run", "mine ~*"),
        ("--run", "mine*"),
        ("--run", ".."),
        ("--redis", ""),
        ("--redis", "valkey"),
        ("--redis", "valkey:port"),
        ("--redis", "valkey:65536"),
        ("--mqtt", "user@broker:8883"),
        ("--outside", ""),
        ("--outside", "node:7040"),
        ("--host", "a b"),
        ("--host", "é.example"),
        ("--host", "a" * 64),
        ("--host", "*"),
    ],
)
def test_secrets_are_not_drawn_for_what_cannot_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str, value: str
) -> None:
    assert main(["secrets", str(tmp_path / "drawn"), f"{option}={value}"]) != 0
    said = capsys.readouterr().err
    shown = repr(int(value) if option == "--days" else value)
    assert f"{option} cannot be used; got {shown}; allowed: " in said
    assert not (tmp_path / "drawn").exists()


def test_secrets_leave_no_folder_where_certificates_cannot_be_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "harness_sdk.cli.secrets.certificates", raising=False)
    # As where it is not installed.
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert main(["secrets", str(tmp_path / "drawn")]) != 0
    assert "need the package cryptography" in capsys.readouterr().err
    assert not (tmp_path / "drawn").exists()


def test_secrets_reach_a_host_by_any_kind_of_name(tmp_path: Path) -> None:
    words = ["--redis", "[fd00::1]:6379", "--outside", "fd00::2", "--run", "a.b-c_1"]
    hosts = ["--host", "*.rollout.octopus.svc", "--host", "10.0.0.2", "--host", "_x.example"]
    assert main(["secrets", str(tmp_path / "drawn"), *words, *hosts]) == 0
    assert "@[fd00::2]:6379/0?" in (tmp_path / "drawn" / "redis.agent").read_text()
    assert "@[fd00::1]:6379/0?" in (tmp_path / "drawn" / "redis.rollout").read_text()


def test_addresses_without_a_password_are_fine_in_arguments() -> None:
    refuse_secrets(["--redis-url", "redis://h:1", "--mqtt-url=mqtt://user@h", "--tokenizer", "x"])


@pytest.mark.parametrize(
    "url",
    [
        "redis://u:hunter2@h:1/0",
        "redis://:hunter2@h",
        "redis://u:hunter2/a@h",
        "redis://u:a@hunter2@h",
        "redis://h?username=u&password=hunter2",
        "rediss://h?ssl_password=hunter2&db=1",
    ],
)
def test_no_password_of_an_address_is_shown(url: str) -> None:
    assert "hunter2" not in masked_url(url)
    assert masked_url(masked_url(url)) == masked_url(url)


def test_nothing_said_in_a_log_reaches_its_margin_or_the_terminal() -> None:
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(PrintableFormatter("%(asctime)s %(levelname)s %(name)s %(message)s"))
    logger = logging.Logger("tools")
    logger.addHandler(handler)
    logger.warning("tool said %s", FORGED)
    try:
        raise RuntimeError(FORGED)
    except RuntimeError:
        logger.exception("file %s", FORGED)
    text = stream.getvalue()
    ours = [line for line in text.split("\n") if line and not line.startswith("    ")]
    assert len(ours) == 2 and all(" tools " in line for line in ours)
    assert "forged\\x1b[2J\\x9b31m\\u2028\\u202edone" in text
    assert not set(text) & set("\r\x1b\x9b\u2028\u202e")


def test_what_can_be_printed_stays_as_it_is() -> None:
    text = "grün 木 👩‍🚀 \\x1b café"
    assert printable(text) == text
    assert printable("a\tb\x00\ud800").encode() == b"a\\tb\\x00\\ud800"


def test_an_error_that_names_a_hostile_file_is_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["rollout", "--config", str(tmp_path / "a\n\x1b[31mERROR root forged")]) == 1
    told = capsys.readouterr().err
    assert "\x1b" not in told and "\nERROR" not in told and "\\x1b[31mERROR" in told
