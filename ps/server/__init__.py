"""The machine of one server process: a shard, in process 0 also the coordinator and the parent membership."""
