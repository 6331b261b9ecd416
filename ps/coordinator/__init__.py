"""The coordinator of a run: a file for each decision. `Coordinator` asks them in their order."""
