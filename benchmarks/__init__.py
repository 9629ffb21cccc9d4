"""What the figures of docs/benchmarks were measured with."""
