"""Octopus SDK: agents that fork, rewind and read each other."""
