"""The impure parts of a worker: its I/O thread, the pipe to ps-worker, signals, child processes."""
