"""Tests of a service or a command over real servers."""
