"""The weights of one shard, the changes that they take, and the arithmetic of each."""
