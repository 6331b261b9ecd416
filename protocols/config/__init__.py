"""What a run is told: its settings, modes, the model as a worker declares it, the key ranges, every constant of time."""
