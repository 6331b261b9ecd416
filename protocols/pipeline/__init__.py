"""The messages that the processes of one pipeline send each other. docs/design/pipelines.md has the protocol."""
