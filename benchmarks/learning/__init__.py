"""Does branching help a policy that learns? Curves with and without each primitive."""
