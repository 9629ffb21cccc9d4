"""Recorded runs of other agent systems: read, rendered to token ids, merged into prefix trees."""
