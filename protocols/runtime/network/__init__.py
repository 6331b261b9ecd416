"""What touches the network: sockets, keys, connections, the clock of a runner."""
