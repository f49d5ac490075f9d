"""One load, served by Regraft and by whatever else is installed, beside the floor that none can be faster than."""

from .floor import Ceilings, Work
from .peers import PEERS, Load
from .run import Row, bench

__all__ = ["PEERS", "Ceilings", "Load", "Row", "Work", "bench"]
