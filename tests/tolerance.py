"""The one place where the suite says how close is close.

Strict on purpose: a wrong mask, scale or offset moves results by far more than rounding does.
"""

from __future__ import annotations

import torch
from torch import Tensor

# float16 and bfloat16: two units in the last place of a value near one.
TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-9, 1e-9),
    torch.float32: (1e-5, 1e-5),
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
}
"""(absolute, relative) by dtype. Integers and booleans must be equal."""


def assert_close(
    actual: Tensor,
    expected: Tensor,
    *,
    dtype: torch.dtype | None = None,
    scale: float = 1.0,
    name: str = "",
) -> None:
    """Assert `|actual - expected| <= scale * (absolute + relative * |expected|)` everywhere.

    Args:
        actual: what was computed.
        expected: the reference, same shape. It may have a wider dtype than `actual`.
        dtype: whose tolerance applies; by default that of `actual`.
        scale: a factor on the tolerance, for errors that grow with depth. Say why where it is not
            1.
        name: what is compared, for the message.

    Raises:
        AssertionError: shapes differ, there is a NaN on either side, or an element is off (an
            infinity must stand in the same place of both). The message gives the largest absolute
            error, the worst element, and how many are off.
    """
    what = f"{name}: " if name else ""
    if actual.shape != expected.shape:
        raise AssertionError(f"{what}expected shape {[*expected.shape]}, got {[*actual.shape]}")
    if actual.numel() == 0:
        return
    dtype = dtype or actual.dtype
    absolute, relative = (scale * t for t in TOLERANCE.get(dtype, (0.0, 0.0)))
    a, e = (x.detach().to("cpu", torch.float64) for x in (actual, expected))
    error = torch.where(a == e, 0.0, (a - e).abs()).nan_to_num(nan=float("inf"))
    allowed = torch.where(e.isfinite(), absolute + relative * e.abs(), 0.0)
    off = error > allowed
    if off.any():
        worst = int((error - allowed).argmax())
        at = tuple(int(i) for i in torch.unravel_index(torch.tensor(worst), a.shape))
        raise AssertionError(
            f"{what}max abs error {error.max().item():.3e} "
            f"({dtype}, allowed {absolute:.1e} + {relative:.1e} * |x|); "
            f"{int(off.sum())} of {a.numel()} elements off, the worst at {at}: "
            f"got {a[at].item():.8g}, expected {e[at].item():.8g}"
        )
