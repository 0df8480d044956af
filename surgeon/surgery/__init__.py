"""Pure code surgery: bytes in, bytes out. No I/O, no SSH, no torch."""

from surgeon.surgery.display import excerpt, unified_diff
from surgeon.surgery.functions import Function, functions
from surgeon.surgery.graft import Grafted, graft, ungraft
from surgeon.surgery.live_path import CannotTell, NotReached, Reached, live_path
from surgeon.surgery.locate import know, locate
from surgeon.surgery.markers import GraftSpec
from surgeon.surgery.outcomes import AlreadyGrafted, Ambiguous, Found, Line, NotFound, NotNeeded, Outcome, Unparsable
from surgeon.surgery.places import EXPERTS, FORWARD, PLACES, Place

__all__ = [
    "EXPERTS",
    "FORWARD",
    "PLACES",
    "AlreadyGrafted",
    "Ambiguous",
    "CannotTell",
    "Found",
    "Function",
    "GraftSpec",
    "Grafted",
    "Line",
    "NotFound",
    "NotNeeded",
    "NotReached",
    "Outcome",
    "Place",
    "Reached",
    "Unparsable",
    "excerpt",
    "functions",
    "graft",
    "know",
    "live_path",
    "locate",
    "ungraft",
    "unified_diff",
]
