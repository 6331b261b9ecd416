"""narrows.worker: ps-worker, the torch optimizer wrapper and the session that feeds it."""
