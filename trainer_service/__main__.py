"""`python -m trainer_service`, the same as `octopus trainer`."""

from __future__ import annotations

import sys

from harness_sdk.cli.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["trainer", *sys.argv[1:]]))
