"""What the processes of one pipeline say to each other. docs/design/pipelines.md has the protocol."""
