"""What of a worker is impure: its I/O thread, its launcher, signals, child processes."""
