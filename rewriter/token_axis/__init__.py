"""The proof: which values of a graph hold one independent row per token, and where tokens mix.

In: a captured or rewritten graph. Out: an abstract value per node, the regions in which tokens mix, and a verdict.
Read value.py first (what is tracked), then analysis.py (how), then the rule files, then regions.py.
"""

from .analysis import Analysis, analyse
from .regions import find_regions
from .value import FIXED, Axis, Value

__all__ = ["FIXED", "Analysis", "Axis", "Value", "analyse", "find_regions"]
