"""`python -m benchmarks.learning run VARIANT SEED --out FOLDER`, then `... report FOLDER`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields
from pathlib import Path

from harness_sdk.cli.interrupts import run_interruptible


def main() -> int:
    """Run one curve, or put curves together."""
    parser = argparse.ArgumentParser(description="Learning curves with and without branching.")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_run(commands.add_parser("run", help="one variant, one seed"))
    report = commands.add_parser("report", help="table and plot from the rows of all runs")
    report.add_argument("rows", nargs="+", type=Path, help="files of JSON lines that `run` wrote")
    report.add_argument("--out", type=Path, required=True, help="JSON list; the plot lies beside")
    report.add_argument("--hardware", required=True, help="what the runs ran on")
    args = parser.parse_args()
    if args.command == "report":
        from benchmarks.learning.report import write_report

        write_report(args.rows, args.out, hardware=args.hardware)
        return 0
    return _run(args)


def _add_run(parser: argparse.ArgumentParser) -> None:
    from benchmarks.learning.study import Plan
    from benchmarks.learning.variants import VARIANTS

    parser.add_argument("variant", choices=VARIANTS)
    parser.add_argument("seed", type=int)
    parser.add_argument("--out", type=Path, required=True, help="new folder for the run")
    parser.add_argument("--rows", type=Path, required=True, help="JSON lines to append to")
    for field in fields(Plan):
        if field.name not in ("variant", "seed"):
            flag = f"--{field.name.replace('_', '-')}"
            kind = Path if isinstance(field.default, Path) else type(field.default)
            parser.add_argument(flag, type=kind, default=field.default)


def _run(args: argparse.Namespace) -> int:
    from benchmarks.learning.study import Plan, learn

    plan = Plan(**{field.name: getattr(args, field.name) for field in fields(Plan)})
    try:
        run_interruptible(learn(plan, args.out, args.rows))
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
