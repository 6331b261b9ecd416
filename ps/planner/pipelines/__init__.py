"""The planner of pipelines: it chooses the host of each stage, by 2206.01288. docs/planning.md has the model."""
