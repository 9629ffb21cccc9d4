"""Repair of small Python functions: tools in a subprocess sandbox, hidden tests as the reward."""
