"""Start-up cost of the chat template probe, for every template of a folder.

Prints the table of docs/benchmarks/template_probe.md: CPU time of this process, not of the clock
on the wall, the least of some runs.

    python -m benchmarks.template_probe tests/data/chat_templates
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

from rollout_service.chat.proof import probe
from rollout_service.chat.refusal import TemplateRefused
from rollout_service.chat.template import Template, template_text

_SPECIAL_TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
_RUNS = 10


def main(folder: Path) -> None:
    """Print a line for each template under `folder`."""
    rows = [
        "| template | answer | jinja compiles it, ms | compiled and probed, ms |",
        "|---|---|---|---|",
    ]
    for path in sorted(folder.glob("*.jinja")):
        source = template_text(path)
        compile_ms = _least_ms(lambda source=source: Template(source, _SPECIAL_TOKENS))
        both_ms = _least_ms(lambda source=source: _answer(source))
        rows.append(f"| `{path.stem}` | {_answer(source)} | {compile_ms:.0f} | {both_ms:.0f} |")
    sys.stdout.write("\n".join(rows) + "\n")


def _answer(source: str) -> str:
    """The mode it is served in, or that it is refused."""
    try:
        return f"`{probe(Template(source, _SPECIAL_TOKENS)).shape.mode}`"
    except TemplateRefused:
        return "refused"


def _least_ms(work: Callable[[], object]) -> float:
    def once() -> float:
        began = time.process_time()
        work()
        return time.process_time() - began

    return 1000 * min(once() for _ in range(_RUNS))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
