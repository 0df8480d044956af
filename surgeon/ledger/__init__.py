"""Revisions, the state of a patch on a node, and the lease."""
