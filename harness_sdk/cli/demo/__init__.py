"""`octopus demo`: a tiny branching agent, warmed up and trained online on this machine."""
