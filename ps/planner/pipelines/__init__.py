"""Which host has which stage of a pipeline, by 2206.01288. docs/planning.md has the model."""
