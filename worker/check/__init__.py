"""ps-worker --check: watches the first steps of a script, and names its faults."""
