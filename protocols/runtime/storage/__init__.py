"""Files of a run in an object store: folders of files that exist twice, and records in parts."""
