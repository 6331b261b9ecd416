"""The checks that an update passes before a shard folds it: --max-update-norm, --robust."""
