"""Which hosts, servers, modes and SPECs a run has on a network. docs/planning.md has the model."""
