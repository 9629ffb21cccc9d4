"""Deep search for models too small to write tool calls unaided."""
