"""Replication of a server to a standby, and failover: the standby serves when the primary is lost."""
