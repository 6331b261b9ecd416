"""What a step of a worker is in each mode, and what it waits for."""
