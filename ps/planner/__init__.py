"""The planner: it chooses the hosts, servers, modes and SPECs of a run on a network. docs/planning.md has the model."""
