"""The registry's wheels, which the lab's environments are built from."""

from surgeon.registry.wheels import cached, fetch, unpack

__all__ = ["cached", "fetch", "unpack"]
