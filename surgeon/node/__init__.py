"""The wire: transports, and the agent that runs on the node."""
