"""Tests of the real commands, together."""
