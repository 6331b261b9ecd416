"""Which samples a worker trains on."""
