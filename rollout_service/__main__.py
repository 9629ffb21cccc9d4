"""`python -m rollout_service`, the same as `octopus rollout`."""

from __future__ import annotations

import sys

from harness_sdk.cli.__main__ import main
from harness_sdk.interpreter import leave

if __name__ == "__main__":
    leave(main(["rollout", *sys.argv[1:]]))
