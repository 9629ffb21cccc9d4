"""Multi-hop questions over Wikipedia passages: a branch for each sub-question."""
