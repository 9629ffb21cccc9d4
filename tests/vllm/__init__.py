"""Tests of the vLLM engine on its CPU build."""
