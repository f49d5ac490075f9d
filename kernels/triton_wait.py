"""What a kernel begins with that is launched as `dependent` says."""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_last(DEPENDENT: tl.constexpr):
    """Wait until the kernel before this one is done, then let the next one be set up."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
