"""The path of a push through one shard: assemble, fold, publish, report."""
