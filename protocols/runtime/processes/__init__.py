"""What starts, watches and ends processes of a command."""
