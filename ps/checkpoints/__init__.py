"""Checkpoint files: their format, the thread that writes them, the whole model."""
