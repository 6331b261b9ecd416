"""ps-worker --check: what a script does, and what is found in it."""
