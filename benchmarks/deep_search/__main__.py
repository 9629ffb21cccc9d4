"""`python -m benchmarks.deep_search --model smollm2 --device cuda --out FOLDER`."""

from __future__ import annotations

import argparse
import logging
import sys
from dataclasses import fields
from pathlib import Path

from benchmarks.deep_search.plan import Plan
from benchmarks.deep_search.study import study
from harness_sdk.cli.interrupts import run_interruptible
from harness_sdk.cli.logs import set_up_logging
from harness_sdk.errors import HarnessError


def main() -> int:
    """Run one plan; 1 where a part of it failed."""
    parser = argparse.ArgumentParser(description="Deep search before and after training.")
    parser.add_argument("--out", type=Path, required=True, help="new folder for the run")
    for field in fields(Plan):
        flag = f"--{field.name.replace('_', '-')}"
        choices = ("cpu", "cuda") if field.name == "device" else None
        parser.add_argument(flag, type=type(field.default), default=field.default, choices=choices)
    args = parser.parse_args()
    if args.out.exists() and any(args.out.iterdir()):
        parser.error(f"{args.out} is not empty: a run would go on with what is in it")
    set_up_logging()
    # Each wait for the trainer is a line of theirs.
    logging.getLogger("harness_sdk.permits").setLevel(logging.WARNING)
    try:
        plan = Plan(**{field.name: getattr(args, field.name) for field in fields(Plan)})
        run_interruptible(study(plan, args.out))
    except HarnessError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    except KeyboardInterrupt:
        return 130
    sys.stdout.write((args.out / "report.md").read_text("utf-8"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
