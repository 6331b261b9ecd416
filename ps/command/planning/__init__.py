"""ps-plan."""
