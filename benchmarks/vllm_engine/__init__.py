"""Benchmarks of the vLLM engine as the sessions and the service use it; see `__main__`."""
