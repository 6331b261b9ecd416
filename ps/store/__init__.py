"""The weights of one shard, the changes that a store takes, and the arithmetic of each change."""
