"""Regraft: serve any Hugging Face causal LM from its own unmodified code.

engine = regraft.wrap(model)
outs = engine.generate(prompts, max_new_tokens=64)
print(engine.report)
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from regraft.face import inspect, install, wrap
    from regraft.passes.registry import register_pass, unregister_pass
    from regraft.rewriter.backend_report import backend_reports
    from regraft.rewriter.compare import Comparison, compare
    from regraft.rewriter.errors import RewriteError
    from regraft.rewriter.report import RewriteReport
    from regraft.rewriter.validate import Validation, ValidationError
    from regraft.runtime.asynchronous import AsyncEngine
    from regraft.runtime.config import EngineConfig
    from regraft.runtime.engine import Engine
    from regraft.runtime.errors import EngineBusyError, RequestError
    from regraft.runtime.install import uninstall

_HOMES = {
    "backend_reports": "rewriter.backend_report",
    "Comparison": "rewriter.compare",
    "compare": "rewriter.compare",
    "RewriteError": "rewriter.errors",
    "RewriteReport": "rewriter.report",
    "Validation": "rewriter.validate",
    "ValidationError": "rewriter.validate",
    "AsyncEngine": "runtime.asynchronous",
    "EngineConfig": "runtime.config",
    "EngineBusyError": "runtime.errors",
    "RequestError": "runtime.errors",
    "Engine": "runtime.engine",
    "inspect": "face",
    "install": "face",
    "uninstall": "runtime.install",
    "register_pass": "passes.registry",
    "unregister_pass": "passes.registry",
    "wrap": "face",
}
__all__ = [
    "AsyncEngine",
    "Comparison",
    "Engine",
    "EngineBusyError",
    "EngineConfig",
    "RequestError",
    "RewriteError",
    "RewriteReport",
    "Validation",
    "ValidationError",
    "backend_reports",
    "compare",
    "inspect",
    "install",
    "register_pass",
    "uninstall",
    "unregister_pass",
    "wrap",
]


def __getattr__(name: str) -> Any:
    """Loaded on first use, so that importing the package costs nothing and changes nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'regraft' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"regraft.{_HOMES[name]}"), name)
    globals()[name] = value
    return value
