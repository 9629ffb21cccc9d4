"""`python -m tests.fuzz`: calls, records, templates and configurations by the thousand.

Prints how many it tried, and ends with 1 where one of them found a fault. Takes as long as the
counts need, or until `--minutes` have passed.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

from rollout_service.engine.base import Engine
from tests.fuzz.calls import fuzz_calls
from tests.fuzz.dice import DiceEngine
from tests.fuzz.inputs import KINDS, fuzz_inputs


def main() -> int:
    """Fuzz and report."""
    args = _arguments()
    logging.basicConfig(level=logging.ERROR)
    # Each refused template and given up record is told in the log.
    logging.getLogger("rollout_service").setLevel(logging.CRITICAL)
    until_s = time.monotonic() + args.minutes * 60 if args.minutes else None
    num_faults = 0
    with TemporaryDirectory() as folder:
        runs = (("dice", DiceEngine(args.seed), args.calls), (
            "tiny hybrid model", _tiny_engine(Path(folder)), args.model_calls,
        ))  # fmt: skip
        for name, engine, count in runs:
            began = time.monotonic()
            found = asyncio.run(fuzz_calls(engine, args.seed, count, until_s=until_s))
            num_faults += len(found.faults)
            _tell(f"{name}, {time.monotonic() - began:.0f} s:", *found.lines())
    for name, check in KINDS.items():
        began = time.monotonic()
        outcome = fuzz_inputs(check, args.seed, getattr(args, name), until_s=until_s)
        num_faults += len(outcome.faults)
        _tell(f"{name}, {time.monotonic() - began:.0f} s: {outcome}", *outcome.faults[:20])
    return 1 if num_faults else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--calls", type=int, default=170_000, help="to an engine of dice")
    parser.add_argument("--model-calls", type=int, default=30_000, help="to the tiny model")
    parser.add_argument("--records", type=int, default=25_000)
    parser.add_argument("--templates", type=int, default=5_000)
    parser.add_argument("--configs", type=int, default=20_000)
    parser.add_argument("--minutes", type=float, default=0.0, help="end early; 0: never")
    return parser.parse_args()


def _tiny_engine(folder: Path) -> Engine:
    import torch

    from rollout_service.engine.transformers import TransformersEngine
    from tests.chat_tokenizers import VOCAB_SIZE, save_chat_tokenizer
    from tests.session_cases import CHAT
    from tests.tiny_models import save_tiny_model

    torch.set_num_threads(1)
    model = save_chat_tokenizer(save_tiny_model(folder, "qwen3_5", vocab_size=VOCAB_SIZE))
    return TransformersEngine(str(model), max_tokens=200_000, detokenize=CHAT.tokenizer.decode)


def _tell(*lines: str) -> None:
    sys.stdout.write("\n".join(lines) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
