"""The trainer: episode DAGs from the stream to packed steps, checkpoints and published adapters."""
