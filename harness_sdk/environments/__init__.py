"""Environments of other projects, played on the rollout service."""
