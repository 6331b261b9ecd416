"""The coordinator of a run: one file for each decision, `Coordinator` has their order."""
