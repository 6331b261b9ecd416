"""Where the parts of a model stand on a network: `Network`, `Job`, `Costs`, `search`. docs/planning.md has the model."""
