"""The `torchserve` command: flags, starting and stopping a server, and the client commands."""
