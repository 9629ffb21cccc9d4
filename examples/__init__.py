"""Agents to run, read and begin from; each folder holds an `agent.py`."""
