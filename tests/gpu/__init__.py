"""Tests that need an accelerator."""
