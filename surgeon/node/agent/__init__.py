"""The program that surgeon runs on a node: standard library only, Python 3.8 or later.

It is shipped as one zip whose name is its sha256, started once per verb, and leaves nothing running.
"""
