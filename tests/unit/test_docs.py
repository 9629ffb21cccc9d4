"""What rots in the documentation: links, generated pages, pictures, navigation."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

from handbook.commands import commands_page, parser_of
from handbook.configuration import COMMAND_MODELS
from handbook.figures import figure_files, figures_page
from handbook.pages import ROOT_PAGES, generated_pages
from harness_sdk.cli.__main__ import COMMANDS
from tests.pages import ROOT, blocks, pages

DOCS = ROOT / "docs"
_LINK = re.compile(r"\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)
_PICTURE_BYTES = 20_000
_FILES = (".py", ".json", ".jsonl", ".toml", ".md")


@pytest.fixture(scope="module")
def generated() -> dict[str, str]:
    return generated_pages(ROOT)


def _anchors(text: str) -> set[str]:
    """As the site and GitHub make them of headings."""
    plain = [re.sub(r"[^\w\s-]", "", found.lower()) for found in _HEADING.findall(text)]
    return {re.sub(r"\s+", "-", found.strip()) for found in plain}


def _text(path: Path, generated: dict[str, str]) -> str | None:
    """A page's text; None where there is no such page."""
    if path.is_relative_to(DOCS) and str(path.relative_to(DOCS)) in generated:
        return generated[str(path.relative_to(DOCS))]
    return path.read_text("utf-8", errors="replace") if path.is_file() else None


def test_every_link_has_its_end(generated: dict[str, str]) -> None:
    texts = {path: path.read_text("utf-8") for path in pages()}
    texts |= {DOCS / name: text for name, text in generated.items()}
    broken = []
    for path, text in texts.items():
        for link in _LINK.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
            if link.startswith(("http://", "https://")):
                continue
            target, _, anchor = link.partition("#")
            found = _text((path.parent / target).resolve() if target else path, generated)
            if found is None or (anchor and anchor not in _anchors(found)):
                broken.append(f"{path.relative_to(ROOT)}: {link}")
    assert not broken, "\n".join(broken)


def test_pages_have_no_code_outside_of_fences() -> None:
    for path in pages():
        fenced = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
        assert not re.findall(r"\n\n    \S", fenced), f"{path}: an indented block is never run"
        for block in blocks(path):
            assert block.language != "sh" or not block.title, f"{block.place}: a script's title"


def test_blocks_that_are_not_run_are_shell_or_python() -> None:
    marked = [block for path in pages() for block in blocks(path) if block.not_run]
    assert marked
    assert {block.language for block in marked} <= {"sh", "python"}


def test_pictures_are_small_and_shown() -> None:
    shown = "".join(path.read_text("utf-8") for path in pages())
    for picture in (DOCS / "concepts").glob("*.svg"):
        assert picture.stat().st_size < _PICTURE_BYTES, picture
        assert re.search(rf"[(/]{picture.name}\)", shown), f"{picture} is on no page"


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from _keys(kind, f"{prefix}{name}.")
        yield prefix + name


def test_flags_and_keys_that_sentences_name_exist() -> None:
    keys = {key for model in COMMAND_MODELS.values() for key in _keys(model)}
    sections = {key.partition(".")[0] for key in keys if "." in key}
    options = {each for name in COMMANDS for each in parser_of(name)._option_string_actions}
    unknown = []
    for path in pages():
        prose = re.sub(r"```.*?```", "", path.read_text("utf-8"), flags=re.DOTALL)
        for span in re.findall(r"`([^`\n]+)`", prose):
            word = re.split(r"[ =]", span)[0]
            key = re.sub(r"^(rollout|trainer)\.", "", word.removeprefix("--").replace("-", "_"))
            named = word.startswith("--") or (key.partition(".")[0] in sections and "." in key)
            # Beginnings of keys, and files, as `metrics.jsonl`.
            other = word in options or word.endswith((".", ".*")) or Path(key).suffix in _FILES
            if named and not other and key not in keys:
                unknown.append(f"{path.relative_to(ROOT)}: {span}")
    assert not unknown, "\n".join(unknown)


def test_navigation_and_pages_are_the_same(generated: dict[str, str]) -> None:
    text = (ROOT / "mkdocs.yml").read_text("utf-8").partition("\nnav:")[2]
    listed = set(re.findall(r": (\S+\.md)$", text, re.MULTILINE))
    written = {str(path.relative_to(DOCS)) for path in DOCS.rglob("*.md")}
    written = {name for name in written | set(generated) if not name.startswith("benchmarks/")}
    assert listed == written


def test_reference_names_exist() -> None:
    for path in (DOCS / "reference").glob("*.md"):
        for name in re.findall(r"^::: (\S+)$", path.read_text("utf-8"), re.MULTILINE):
            module, _, attribute = name.rpartition(".")
            assert hasattr(importlib.import_module(module), attribute), f"{path}: {name}"


def test_generated_pages_tell_every_key_command_and_message(generated: dict[str, str]) -> None:
    configuration = generated["reference/configuration.md"]
    commands, wire = generated["reference/commands.md"], generated["reference/wire.md"]
    for name in COMMANDS:
        assert f"## octopus {name}\n" in commands
        has_settings = parser_of(name).get_default("overrides") is not None
        assert has_settings == (name in COMMAND_MODELS)
    for key in ("engine.vllm.page_tokens", "batch.max_policy_lag", "limits.thread_budget"):
        assert f"`{key}`" in configuration
    assert "`admission_s` | `float | None` | `None` | From opening an episode" in configuration
    assert "| 3 | `expected_head` | `uint64` | The head the caller last saw;" in wire
    assert "| 15 | `metrics` | map of `string` to `double` | area/name -> value: sums since" in wire


def test_every_option_has_a_text(generated: dict[str, str]) -> None:
    rows = generated["reference/configuration.md"].splitlines()
    assert not [row for row in rows if row.startswith("| `") and row.endswith("|  |")]


def test_commands_page_tells_nothing_of_who_builds_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OCTOPUS_REDIS_URL", "redis://:secret@elsewhere")
    assert "elsewhere" not in commands_page()


def test_figures_are_those_of_the_files(generated: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "speed_h200.json").write_text('{"fast_ms": 1.5, "slow_ms": null}')
    (tmp_path / "speed_h200_detail.json").write_text('{"hardware": "one H200", "noise": 1}')
    (tmp_path / "trees_cpu.json").write_text('[{"tree": "a|b", "speedup": 2.0}]')
    page = figures_page(tmp_path)
    for line in (
        "- hardware: one H200", "| `fast_ms` | 1.5 |", "| `slow_ms` | - |", "| a\\|b | 2 |",
    ):  # fmt: skip
        assert line in page
    for path in figure_files(DOCS / "benchmarks"):
        assert f"({path.name})" in generated["benchmarks/index.md"]


def test_root_pages_are_there() -> None:
    assert all((ROOT / name).is_file() for name in ROOT_PAGES)
