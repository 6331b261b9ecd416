"""The loops over values. Each kernel has one name, here and in tests/kit/reference.py (NumPy, the specification)."""
