"""The kernels: loops over values. tests/kit/reference.py specifies each under the same name, in NumPy."""
