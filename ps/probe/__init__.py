"""ps-probe: it measures the links between machines. docs/probing.md has the fields of network.json."""
