"""The step of a worker in each mode: what it computes, pushes and waits for."""
