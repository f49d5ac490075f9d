"""Paged attention on the GPU: which kernel runs, on what grid and with what tiles.

Nothing here reads a tensor's values: grids come from shapes, so a captured CUDA graph stays right
when lengths change.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from regraft.kernels.dependent import dependent
from regraft.kernels.device import num_processors
from regraft.kernels.whole import power_of_2

from .triton_decode import combine_kernel, decode_kernel
from .triton_prefill import prefill_kernel

_MIN_SPLIT = 64
"""A split of a history shorter than this does not pay for combining it.

Measured on an H200, one sequence of 622 with 8 key heads of 128: 8.2 us, with splits of 256 at least 14.4.
"""

_MAX_SPLITS = 64

_LONG = 1024
"""New tokens a sequence from which on a prefill takes twice as many keys a tile.

Measured on an H200 at width 128: 8192 tokens 8 % faster, 1024 behind 7168 a fifth, eight of 64 to 1000 a tenth slower.
"""

_WAVES = 4
"""Programs a processor gets to work on at least, side by side or one after the other.

Measured on an H200 with contexts of 128 to 1280: splits of 1 for 128 sequences of 8 key heads, 4 for 16 and for one.
"""

_SHARED_WAVES = 2
"""The same where a tile holds keys and values in one: a processor holds one program at a time.

Measured on an H200 with 64 sequences of 4096 and 16 heads: 116 us with 4 splits, 151 with 9.
"""


def paged_attention_triton(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cu_seqlens: Tensor,
    context_lens: Tensor,
    block_table: Tensor,
    slot_mapping: Tensor,
    scale: float,
    window: int = 0,
    chunk: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    rel_bias: Tensor | None = None,
    *,
    splits: int | None = None,
    min_split: int = _MIN_SPLIT,
    long: int = _LONG,
) -> Tensor:
    """`paged_attention` by Triton kernels.

    Sequences with one new token go to the decode kernel, which cuts a history into `splits`; the
    others go to the prefill kernel. A row with no more tokens than sequences is a decode step, and
    the decode kernel alone serves it, whatever the sequences' lengths.
    """
    tokens, heads, width = q.shape
    kv_heads, v_width = v.shape[1:]
    group, seqs, page_size = heads // kv_heads, len(context_lens), k_cache.shape[1]
    out = q.new_empty(tokens, heads, v_width)
    if not tokens:
        return out
    shared = _is_shared(k_cache, v_cache)
    parts = -(-group // _max_rows(max(width, v_width), q.element_size(), shared and tokens <= seqs))
    share = -(-group // parts)
    operands = (q, k, v, k_cache, v_cache)
    common: dict[str, Any] = {
        "operands": operands,
        "strides": tuple(x.stride() for x in operands),
        "extras": (_by_head(sinks), _by_head(alibi_slopes), rel_bias),
        "rel_strides": (0, 0, 0) if rel_bias is None else rel_bias.stride(),
        "out_ptr": out,
        "cu_seqlens_ptr": cu_seqlens,
        "context_lens_ptr": context_lens,
        "block_table_ptr": block_table,
        "stride_table": block_table.stride(0),
        "slot_mapping_ptr": slot_mapping,
        "num_tokens": tokens,
        "scale": scale,
        "WINDOW": window,
        "CHUNK": chunk,
        "SCORE": _score(scale, softcap, alibi_slopes, rel_bias),
        "GROUP": group,
        "SHARE": share,
        "PAGE_SIZE": page_size,
        "D": _parts(width),
        "DV": _parts(v_width),
        **dependent(q.device),
        "enable_fp_fusion": True,  # else Triton 3.9 warns that its default will change
    }
    decode_only = tokens <= seqs
    if seqs:
        rows = min(tokens, seqs)
        if splits is None:
            splits = _num_splits(
                q.device,
                rows * kv_heads * parts,
                block_table.shape[1] * page_size,
                _SHARED_WAVES if shared else _WAVES,
            )
        tiles = _decode_tiles(share, max(width, v_width), q.element_size(), shared)
        _decode(
            common,
            rows,
            (kv_heads * parts, splits, seqs),
            MIN_SPLIT=min_split,
            EVERY_TOKEN=decode_only,
            **tiles,
        )
    if not decode_only:
        _prefill(common, tokens, seqs, kv_heads * parts, tokens >= long * seqs)
    return out


def _decode(common: dict[str, Any], rows: int, grid: tuple[int, int, int], **options: Any) -> None:
    """Both kernels of a decode; `rows` are the sequences, or with EVERY_TOKEN the tokens."""
    out, cu_seqlens = common["out_ptr"], common["cu_seqlens_ptr"]
    _, heads, v_width = out.shape
    _, splits, seqs = grid
    scratch: tuple[Tensor | None, Tensor | None] = (None, None)
    if splits > 1:
        partial = torch.empty(rows, heads, splits, v_width, dtype=torch.float32, device=out.device)
        scratch = (
            partial,
            torch.empty(2, rows, heads, splits, dtype=torch.float32, device=out.device),
        )
    decode_kernel[grid](
        scratch=scratch, num_rows=rows, num_splits=splits, IS_SPLIT=splits > 1, **options, **common
    )
    if splits > 1:
        s, v = max(4, power_of_2(splits)), power_of_2(v_width)
        combine_kernel[(rows, heads)](
            scratch,
            out,
            cu_seqlens,
            seqs,
            rows,
            splits,
            EVERY_TOKEN=options["EVERY_TOKEN"],
            DV=v_width,
            S=s,
            V=v,
            # Four warps where one holds all took 2 to 5 us longer on an H200.
            num_warps=max(1, min(8, s * v // 2048)),
            enable_fp_fusion=True,
            **dependent(out.device),
        )


def _prefill(common: dict[str, Any], tokens: int, seqs: int, programs: int, is_long: bool) -> None:
    """The kernel of sequences with several new tokens; `programs` for each block of them."""
    width, v_width = common["D"][0], common["DV"][0]
    tiles = _prefill_tiles(width, v_width, common["out_ptr"].element_size(), is_long)
    block = tiles["M"] // common["SHARE"]
    prefill_kernel[(tokens // block + seqs + 1, programs)](
        num_seqs=seqs,
        Q=block,
        W=power_of_2(block),
        # Twice the loops to compile: only where a product takes longer than that is soon worth.
        UNMASKED=not common["WINDOW"] and not common["CHUNK"] and max(width, v_width) <= 256,
        **tiles,
        **common,
    )


def _by_head(x: Tensor | None) -> Tensor | None:
    """A number a head, side by side as kernels read them."""
    return None if x is None else x.contiguous()


def _score(
    scale: float, softcap: float, alibi_slopes: Tensor | None, rel_bias: Tensor | None
) -> tuple[float, bool, int, bool]:
    """What makes a score of a product, see `triton_tile.py`."""
    reach = 0 if rel_bias is None else rel_bias.shape[2]
    is_plain = not softcap and alibi_slopes is None and not reach and scale > 0
    return softcap, alibi_slopes is not None, reach, is_plain


def _parts(width: int) -> tuple[int, int, int]:
    """A head size and the two powers of two that cover it, the second 0 if one does: 576 is 512 and 64.

    One alone would load and multiply up to twice as much. Tiles narrower than 64 are not worth a product of their own.
    """
    main = max(16, 1 << (width.bit_length() - 1))
    rest = 0 if width <= main else max(64, power_of_2(width - main))
    return (width, 2 * main, 0) if rest >= main else (width, main, rest)


def _num_splits(device: torch.device, programs: int, max_length: int, waves: int) -> int:
    """Splits of a history such that a small batch fills the device so many times over."""
    wanted = round(waves * num_processors(device) / programs)
    return max(1, min(wanted, -(-max_length // _MIN_SPLIT), _MAX_SPLITS))


def _is_shared(k_cache: Tensor, v_cache: Tensor) -> bool:
    """Whether cached values are the main parts of the cached keys, of a type that tensor cores take as it is."""
    same = v_cache.data_ptr() == k_cache.data_ptr() and v_cache.stride() == k_cache.stride()
    width, v_width = k_cache.shape[3], v_cache.shape[3]
    return same and k_cache.element_size() == 2 and _parts(width)[:2] == (width, v_width)


def _max_rows(width: int, itemsize: int, is_shared: bool = False) -> int:
    """Query rows of a prefill tile, and heads that a program takes at most: what registers hold."""
    if is_shared:
        return 64
    return max(16, (128 if width <= 128 else 64 if width <= 256 else 32) * 2 // itemsize)


def _decode_tiles(share: int, width: int, itemsize: int, shared: bool) -> dict[str, Any]:
    if shared:
        return _shared_tiles(share)
    # Measured on an H200 at width 128: two warps and three stages read 10 to 20 % faster than four and two.
    return {
        "M": max(16, power_of_2(share)),
        "N": _keys(width, itemsize),
        "num_warps": 2 if width <= 128 and share <= 16 else 4,
        "num_stages": 3 if width <= 256 else 2,
        "SHARED": False,
    }


def _shared_tiles(share: int) -> dict[str, Any]:
    return {
        "M": max(16, power_of_2(share)),
        "N": 64,
        "num_warps": 4 if share <= 16 else 8,
        "num_stages": 2,
        "SHARED": True,
    }


def _prefill_tiles(k_width: int, v_width: int, itemsize: int, is_long: bool) -> dict[str, int]:
    width = max(k_width, v_width)
    rows = _max_rows(width, itemsize)
    return {
        "M": rows,
        "N": _keys(width, itemsize) * (2 if is_long and width <= 128 else 1),
        # Eight warps on a product narrower than 64 made Triton 3.6 address shared memory out of range.
        "num_warps": 8 if rows >= 128 and width <= 128 and min(k_width, v_width) > 32 else 4,
        "num_stages": 3 if width <= 256 else 2,
    }


def _keys(width: int, itemsize: int) -> int:
    """Keys a tile."""
    return max(16, (64 if width <= 128 else 32 if width <= 256 else 16) * 2 // itemsize)
