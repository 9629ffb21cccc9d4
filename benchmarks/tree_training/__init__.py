"""How fast and how large packed trees train, beside the same paths flattened and beside stock."""
