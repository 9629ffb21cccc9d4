"""Runs whose processes are killed and whose network is cut."""
