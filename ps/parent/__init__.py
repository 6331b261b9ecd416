"""A shard as a child of the parent's shard with the same keys."""
