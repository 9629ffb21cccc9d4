"""Stubs of the wire, one folder for each version of it."""
