"""The model of a worker as arrays: parameters, buffers, optimizers, slices of it."""
