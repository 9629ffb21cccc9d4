"""python -m benchmarks.tree_training --device cpu|cuda --out FILE [--only NAME] [--seconds N]."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path


def main() -> None:
    """Parse, measure, print a row each, draw the plot."""
    parser = argparse.ArgumentParser(description="Packed trees against flattened paths.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, required=True, help="JSON list of rows")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        help="cases whose names contain one; the file keeps the others",
    )
    parser.add_argument("--seconds", type=float, help="start no case after so long")
    args = parser.parse_args()
    begin = time.monotonic()

    import torch

    from benchmarks.tree_training.cases import cpu_plan, cuda_plan
    from benchmarks.tree_training.plot import draw
    from benchmarks.tree_training.run import Bench

    plan = cuda_plan() if args.device == "cuda" else cpu_plan()
    if args.device == "cpu":
        torch.set_num_threads(1)
    cases = [c for c in plan.cases if not args.only or any(name in c.name for name in args.only)]
    if not cases:
        known = ", ".join(case.name for case in plan.cases)
        parser.error(f"no case named {' or '.join(args.only)}; there are: {known}")
    deadline = begin + (args.seconds or plan.seconds)
    bench = Bench(plan, args.device, args.out, deadline=deadline)
    bench.detail["command"] = "python -m benchmarks.tree_training " + " ".join(sys.argv[1:])
    if args.only:
        bench.keep_earlier()
    bench.run(cases)
    draw(bench.all_rows(), bench.detail, args.out.with_suffix(".svg"))


if __name__ == "__main__":
    main()
