"""narrows.protocols: what workers and servers say, and when. Pure: no socket, thread, clock, file or randomness."""
