"""A run at a glance: its record becomes a history, and a history a page, a terminal screen and metrics."""
