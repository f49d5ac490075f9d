"""Why and where Dynamo ended a graph before the code that it traces was at its end."""

from __future__ import annotations

import re

from torch import fx

_BEFORE_REASON = re.compile(r"^.*?(?:Graph Break Reason|Reason): *", re.DOTALL)


def graph_break(module: fx.GraphModule) -> str:
    """The reason and the line of code, in one line; "" for a graph that goes on to the end."""
    found = getattr(module, "compile_subgraph_reason", None)
    if found is None or not found.graph_break:
        return ""
    reason = _BEFORE_REASON.sub("", str(found.reason)).strip().partition("\n")[0]
    if not found.user_stack:
        return reason
    frame = found.user_stack[-1]
    return f"{reason} ({frame.filename.rpartition('/')[2]}:{frame.lineno}: {frame.line})"
