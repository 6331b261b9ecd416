"""narrows.ps: ps-serve, the shards of a parameter server and all that they keep."""
