"""ps-probe: measures the links between machines. docs/probing.md has the fields."""
