"""narrows.compression.cuda: the kernels of a GPU, and how they are launched. narrows.compression.device gives their order."""
