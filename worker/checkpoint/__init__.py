"""States of optimizers, and the files of a worker."""
