"""A standby: what it copies, and when it serves in the place of its server."""
