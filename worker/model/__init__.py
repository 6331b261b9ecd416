"""The model of a worker as arrays: parameters, module buffers, optimizers, slices of a group."""
