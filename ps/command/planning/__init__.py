"""The command ps-plan."""
