"""The machine of one server process: a shard, in process 0 the coordinator, and the membership in the run above."""
