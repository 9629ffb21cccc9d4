"""Names by which the host and the engine core speak to each other, beside vLLM's own."""

from __future__ import annotations

COMMAND = "octopus_cursors"
"""The core's utility call that carries cursor commands."""
LOAD_DETOKENIZER = "octopus_detokenizer"
"""The one that brings the decoder for stop strings."""
RESULT_KEY = "octopus"
"""Where a finished request's report lies in its `kv_transfer_params`."""
