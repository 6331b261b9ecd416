"""The relay at which workers of gossip meet that cannot dial each other."""
