"""`octopus template`: whether a chat template can be served, how, and where it rewrites history."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from harness_sdk.cli.option_file import render_options
from harness_sdk.cli.settings import add_file_arguments, json_object
from harness_sdk.errors import ConfigError
from harness_sdk.json_values import is_object

_DEFAULT_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument(
        "template",
        type=Path,
        metavar="FILE.jinja|DIR",
        help="a chat template, or a model folder that holds one",
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="DIR|FILE",
        help="check the token ids too: the model's tokenizer.json or a folder that holds it",
    )
    parser.add_argument(
        "--variables",
        type=json_object,
        default={},
        metavar="JSON",
        help='what the template is given besides, as {"enable_thinking": false}',
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    add_file_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Print the probe's answer; 1 where the template is refused."""
    if args.dry_run:
        sys.stdout.write(render_options(args))
        return 0
    answer = _answer(args.template, args.tokenizer, args.variables)
    if args.json:
        sys.stdout.write(json.dumps(answer, ensure_ascii=False) + "\n")
    else:
        sys.stdout.write("".join(f"{key:17} {_shown(value)}\n" for key, value in answer.items()))
    return 0 if answer["served"] else 1


def _answer(path: Path, tokenizer: Path | None, variables: dict[str, Any]) -> dict[str, Any]:
    from rollout_service.chat import ChatRenderer, ChatTokenizer
    from rollout_service.chat.proof import probe
    from rollout_service.chat.refusal import TemplateRefused

    loaded = ChatTokenizer.load(tokenizer) if tokenizer is not None else None
    try:
        template = _load(path, tokenizer, variables)
        probed = probe(template)
        if loaded is not None:
            ChatRenderer(loaded, template)
    except ConfigError as error:
        parted = error.first_difference if isinstance(error, TemplateRefused) else None
        reason = f"{error.message}: {error.value}" if error.value else error.message
        return _fields(served=False, reason=reason, difference=parted)
    reason = "; ".join(probed.remarks) or "every increment is what the template itself renders"
    shape = probed.shape
    return _fields(
        served=True,
        mode=shape.mode,
        terminator=shape.terminator,
        reason=reason,
        difference=probed.rewrites,
    )


def _load(path: Path, tokenizer: Path | None, variables: dict[str, Any]) -> Any:
    from rollout_service.chat.template import (
        Template,
        folder_tokens,
        load_template,
        template_text,
    )

    if path.is_dir():
        return load_template(path, variables)
    folder = tokenizer.parent if tokenizer is not None and tokenizer.is_file() else tokenizer
    tokens = _DEFAULT_TOKENS | (folder_tokens(folder) if folder is not None else {})
    return Template(template_text(path), tokens, variables)


def _fields(
    *, served: bool, reason: str, difference: Any, mode: str = "", terminator: str = ""
) -> dict[str, Any]:
    return {
        "served": served,
        "mode": mode or None,
        "terminator": terminator if served else None,
        "reason": reason,
        "first_difference": dataclasses.asdict(difference) if difference is not None else None,
    }


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_object(value):
        return "{case}, character {at}: {expected!r} becomes {found!r}".format(**value)
    return "-" if value is None else str(value) if value.isprintable() and value else repr(value)
