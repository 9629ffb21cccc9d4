"""The rollout service: episodes of branching agents on an engine, recorded and streamed."""
