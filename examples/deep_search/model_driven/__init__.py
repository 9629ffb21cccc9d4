"""Deep search by a model that writes its own tool calls."""
