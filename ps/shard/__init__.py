"""The path of a push through one shard: assembled, folded, published, reported."""
