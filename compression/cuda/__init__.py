"""narrows.compression.cuda: the kernels of a GPU, and their launches. narrows.compression.device has their order."""
