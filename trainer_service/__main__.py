"""`python -m trainer_service`, the same as `octopus trainer`."""

from __future__ import annotations

import sys

from harness_sdk.cli.__main__ import main
from harness_sdk.interpreter import leave

if __name__ == "__main__":
    leave(main(["trainer", *sys.argv[1:]]))
