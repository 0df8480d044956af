"""Gives the tests of what runs inside sglang a torch: the one that the lab's environments share, downloaded once."""

from __future__ import annotations

import sys

from surgeon import lab

_layer = str(lab.torch_layer())
if _layer not in sys.path:
    # Behind everything else: the layer brings packages of its own that must not hide the test environment's.
    sys.path.append(_layer)
