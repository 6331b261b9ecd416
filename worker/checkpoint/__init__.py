"""Optimizer states and the checkpoint files that a worker writes and reads."""
