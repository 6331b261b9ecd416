"""The samples of a worker: shares, ranges, and states of loaders."""
