"""The checks that an update passes before a shard folds it: --clip-factor, --robust."""
