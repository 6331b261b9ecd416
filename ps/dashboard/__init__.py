"""The dashboard: the events of a record become a history, and a history a page, a terminal screen and metrics."""
