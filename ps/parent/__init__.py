"""A shard of a cluster as a child of the run above."""
