"""The filters of updates before a shard folds them: --max-update-norm, --robust."""
