"""Deep search by a single agent that writes its own tool calls."""
