"""python -m benchmarks.vllm_engine --device cpu|cuda --out FILE [--only NAME...] [--model M]."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from benchmarks.vllm_engine.run import NAMES, run


def main() -> None:
    """Parse, measure, print the tables."""
    parser = argparse.ArgumentParser(description="Benchmarks of the vLLM engine.")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--out",
        type=Path,
        required=True,
        help="JSON file; --only adds to it",
    )
    parser.add_argument("--only", nargs="+", choices=NAMES, default=list(NAMES))
    parser.add_argument("--model", default="", help="model folder, or the name of a shape")
    parser.add_argument(
        "--tell", type=Path, help="write this file's .up once engines serve, and .done at the end"
    )
    parser.add_argument(
        "--wait", type=Path, nargs="+", default=[], help="measure once these files are there"
    )
    parser.add_argument("--samples", type=int, help="of fork, rewind and mount")
    parser.add_argument("--episodes", type=int, help="of the load, and of the admission")
    parser.add_argument("--pool-gib", type=int, help="pool of every engine but the admission's")
    args = parser.parse_args()
    failed = asyncio.run(run(args, "python -m benchmarks.vllm_engine " + " ".join(sys.argv[1:])))
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
