"""Tests of one part, without servers."""
