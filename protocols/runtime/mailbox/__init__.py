"""A transport without a port: messages are objects in a bucket or in a shared folder, which all machines dial."""
