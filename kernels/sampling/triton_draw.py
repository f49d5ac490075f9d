"""Draws a token of each row on the GPU without sorting it: one program a row, whatever is beside it.

Where top-k and top-p end is searched for among the float32 numbers themselves, which are ordered as their bits are: one
reading of the scores tells which quarter of the numbers in question holds the end. To have little to read, the row is
first cut to the scores that can matter. A lower bound of them comes from the best score of every BLOCK-th token: if k
of those are no less than it, so are k of the row, and what they are of the sum, so much at least are those of the row.
If more scores are left than fit into a block, the row itself is read each time.

Sums that decide where top-p ends are added in float32 by each lane, and in float64 over the lanes; those that decide
what is drawn, in float64. Their order is that of the tile, for every row.
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
"""Scores a program reads at a time, and the most that a row is cut to."""


def draw_triton(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniforms: Tensor,
) -> tuple[Tensor, Tensor]:
    """See schema.draw."""
    rows, vocab = logits.shape
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if not rows:
        return tokens, logprobs
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    few = torch.empty(rows, _BLOCK, dtype=torch.float32, device=logits.device)
    places = torch.empty(rows, _BLOCK, dtype=torch.int32, device=logits.device)
    settings = (x.contiguous() for x in (temperature, top_k, top_p, min_p, uniforms))
    draw_kernel[(rows,)](
        logits, logits.stride(0), vocab, *settings, few, places, tokens, logprobs,
        BLOCK=_BLOCK, num_warps=16, enable_fp_fusion=False,
    )  # fmt: skip
    return tokens, logprobs


# What the kernel knew of strides and alignment would change how it spreads a row over threads, and so its sums.
@triton.jit(
    do_not_specialize=["stride_row", "vocab"],
    do_not_specialize_on_alignment=["logits_ptr", "few_ptr", "places_ptr"],
)
def draw_kernel(
    logits_ptr, stride_row, vocab, temperature_ptr, top_k_ptr, top_p_ptr, min_p_ptr, uniforms_ptr, few_ptr, places_ptr,
    tokens_ptr, logprobs_ptr, BLOCK: tl.constexpr,
):  # fmt: skip
    """few_ptr, places_ptr: [S, BLOCK] float32 and int32 to work in."""
    row = tl.program_id(0)
    row_ptr = logits_ptr + row.to(tl.int64) * stride_row
    few_ptr += row * BLOCK
    places_ptr += row * BLOCK
    temperature = tl.load(temperature_ptr + row).to(tl.float32)
    top_k = tl.load(top_k_ptr + row)
    top_p = tl.load(top_p_ptr + row)

    lanes_B, best, is_fit = best_of_lanes(row_ptr, temperature, vocab, BLOCK)
    n = tl.where(is_fit, vocab, 0)  # nothing more is done with a row that is not fit
    source = (row_ptr, few_ptr, temperature, n, 0)
    has_top_k = (top_k > 0) & (top_k < n)
    has_top_p = (top_p < 1.0) & is_fit
    num_few = 0
    floor = tl.full([], float("-inf"), tl.float32)
    mass = tl.full([], 0.0, tl.float64)
    if has_top_k | has_top_p:
        floor, mass, num_few = cut(
            source, lanes_B, places_ptr, best, has_top_k, top_k, top_p, BLOCK
        )
    source = (row_ptr, few_ptr, temperature, tl.where(num_few > 0, 0, n), num_few)

    first = 0
    if has_top_k:
        floor = descend(source, best, floor, top_k.to(tl.float64), True, BLOCK)
        if has_top_p:
            mass = mass_of(source, best, floor, BLOCK)
    if has_top_p:
        floor = descend(source, best, floor, top_p * mass, False, BLOCK)
        first = first_of_equals(source, best, floor, top_p * mass, BLOCK)

    min_p = tl.load(min_p_ptr + row)
    total = total_of(source, best, floor, first, min_p, BLOCK)
    aim = tl.load(uniforms_ptr + row) * total  # below the total, rounded too: uniforms are below 1
    place = invert(source, best, floor, first, min_p, aim, BLOCK)
    token = tl.where(num_few > 0, tl.load(places_ptr + place, mask=num_few > 0, other=0), place)
    score = tl.div_rn(tl.load(row_ptr + token).to(tl.float32), temperature)
    logprob = score - best - tl.log(total.to(tl.float32))
    tl.store(tokens_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, tl.where(is_fit, logprob, float("nan")))


@triton.jit
def best_of_lanes(row_ptr, temperature, vocab, BLOCK: tl.constexpr):
    """The best score of every BLOCK-th token [BLOCK], the best of all, and whether the row is fit to choose from."""
    best_B = tl.full([BLOCK], float("-inf"), tl.float32)
    nan_B = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, vocab, BLOCK):
        v_B = begin + tl.arange(0, BLOCK)
        x_B = tl.load(row_ptr + v_B, mask=v_B < vocab, other=float("-inf")).to(tl.float32)
        nan_B |= (x_B != x_B).to(tl.int32)
        best_B = tl.maximum(best_B, x_B)
    # Division keeps the order, so that one is enough.
    best_B = tl.div_rn(best_B, temperature)
    best = tl.max(best_B, 0)
    has_nan = tl.max(nan_B, 0) > 0
    return best_B, best, (best > float("-inf")) & (best < float("inf")) & (has_nan == 0)


@triton.jit
def length_of(source):
    """How many scores a source has: those of a row, or, if there are any, the few that it was cut to."""
    return source[3] + source[4]


@triton.jit
def scores_of(source, begin, BLOCK: tl.constexpr):
    """[BLOCK] scores from place `begin` of a source on, -inf behind its end, and their places."""
    row_ptr, few_ptr, temperature, num_row, num_few = source
    v_B = begin + tl.arange(0, BLOCK)
    x_B = tl.load(row_ptr + v_B, mask=v_B < num_row, other=float("-inf")).to(tl.float32)
    few_B = tl.load(few_ptr + v_B, mask=v_B < num_few, other=float("-inf"))
    return tl.where(v_B < num_few, few_B, tl.div_rn(x_B, temperature)), v_B


@triton.jit
def cut(source, lanes_B, places_ptr, best, has_top_k, top_k, top_p, BLOCK: tl.constexpr):
    """A score below which nothing is kept, what the row weighs if there is no top-k, and how many scores the row was
    cut to: 0 if too many are left.
    """
    row_ptr, few_ptr, temperature, n, _ = source
    tl.store(few_ptr + tl.arange(0, BLOCK), lanes_B)
    tl.debug_barrier()
    lanes = (row_ptr, few_ptr, temperature, 0, BLOCK)
    floor = tl.full([], float("-inf"), tl.float32)
    mass = tl.full([], 0.0, tl.float64)
    if has_top_k:
        floor = descend(lanes, best, floor, top_k.to(tl.float64), True, BLOCK)
    else:
        mass = mass_of(source, best, floor, BLOCK)
        floor = tail_of(best, top_p, mass, n)
        # A little more than top_p: the sums of lanes and of the row are rounded each in its own way.
        floor = descend(lanes, best, floor, top_p * mass * 1.00001, False, BLOCK)
    tl.debug_barrier()  # the lanes are read, and written over now
    count = gather(source, places_ptr, floor, BLOCK)
    tl.debug_barrier()
    return floor, mass, tl.where(count <= BLOCK, count, 0)


@triton.jit
def gather(source, places_ptr, floor, BLOCK: tl.constexpr):
    """Writes scores from `floor` on, and where in the row they are, in its order, as far as they fit; how many there
    are.
    """
    few_ptr = source[1]
    count = 0
    for begin in range(0, length_of(source), BLOCK):
        s_B, v_B = scores_of(source, begin, BLOCK)
        is_left_B = (s_B >= floor) & (v_B < length_of(source))
        left_B = is_left_B.to(tl.int32)
        to_B = count + tl.cumsum(left_B, 0) - 1
        fits_B = is_left_B & (to_B < BLOCK)
        tl.store(few_ptr + to_B, s_B, mask=fits_B)
        tl.store(places_ptr + to_B, v_B, mask=fits_B)
        count += tl.sum(left_B, 0)
    return count


@triton.jit
def key_of(score):
    """A number, int64, that is ordered as float32 scores are."""
    bits = score.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64)


@triton.jit
def score_of(key):
    """The score of a number of `key_of`."""
    bits = key.to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def descend(source, best, floor, target, COUNTS: tl.constexpr, BLOCK: tl.constexpr):
    """The largest score from `floor` on such that those no less than it come to `target`: in number with COUNTS, else
    in weight. `floor` where none is.
    """
    low, high = key_of(floor), key_of(best) + 1  # high: not enough from there on
    while high - low > 1:
        step = (high - low + 3) // 4
        key_1 = tl.minimum(low + step, high - 1)
        key_2 = tl.minimum(low + 2 * step, high - 1)
        key_3 = tl.minimum(low + 3 * step, high - 1)
        score_1, score_2, score_3 = score_of(key_1), score_of(key_2), score_of(key_3)
        sum_1_B = tl.zeros([BLOCK], tl.float32)
        sum_2_B = tl.zeros([BLOCK], tl.float32)
        sum_3_B = tl.zeros([BLOCK], tl.float32)
        for begin in range(0, length_of(source), BLOCK):
            s_B, _ = scores_of(source, begin, BLOCK)
            weight_B = tl.exp(s_B - best)
            if COUNTS:
                weight_B = tl.full([BLOCK], 1.0, tl.float32)
            sum_1_B += tl.where(s_B >= score_1, weight_B, 0.0)
            sum_2_B += tl.where(s_B >= score_2, weight_B, 0.0)
            sum_3_B += tl.where(s_B >= score_3, weight_B, 0.0)
        if tl.sum(sum_3_B.to(tl.float64), 0) >= target:
            low = key_3
        elif tl.sum(sum_2_B.to(tl.float64), 0) >= target:
            low = key_2
            high = key_3
        elif tl.sum(sum_1_B.to(tl.float64), 0) >= target:
            low = key_1
            high = key_2
        else:
            high = key_1
    return score_of(low)


@triton.jit
def mass_of(source, best, floor, BLOCK: tl.constexpr):
    """The weight of the scores from `floor` on, float64, summed as `descend` does."""
    sum_B = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, length_of(source), BLOCK):
        s_B, _ = scores_of(source, begin, BLOCK)
        sum_B += tl.where(s_B >= floor, tl.exp(s_B - best), 0.0)
    return tl.sum(sum_B.to(tl.float64), 0)


@triton.jit
def tail_of(best, top_p, mass, n):
    """A score so low that n scores below it do not come to what top-p drops."""
    share = (tl.maximum(1.0 - top_p, 1e-30) * mass / n).to(tl.float32)
    return best + tl.log(share) - 0.01 - 1e-6 * tl.abs(best)


@triton.jit
def first_of_equals(source, best, floor, target, BLOCK: tl.constexpr):
    """The place from which on scores that equal `floor` are kept: the last of them, as many as `target` takes, at least
    one.
    """
    above_B = tl.zeros([BLOCK], tl.float32)
    equal_B = tl.zeros([BLOCK], tl.float32)
    for begin in range(0, length_of(source), BLOCK):
        s_B, _ = scores_of(source, begin, BLOCK)
        above_B += tl.where(s_B > floor, tl.exp(s_B - best), 0.0)
        equal_B += tl.where(s_B == floor, 1.0, 0.0)
    equal = tl.sum(equal_B.to(tl.float64), 0)
    missing = target - tl.sum(above_B.to(tl.float64), 0)
    kept = tl.maximum(tl.ceil(missing / tl.exp(floor - best).to(tl.float64)), 1.0)
    dropped = tl.maximum(equal - kept, 0.0).to(tl.int32)
    first = 0
    if dropped > 0:
        seen = 0
        for begin in range(0, length_of(source), BLOCK):
            s_B, v_B = scores_of(source, begin, BLOCK)
            is_equal_B = (s_B == floor) & (v_B < length_of(source))
            rank_B = seen + tl.cumsum(is_equal_B.to(tl.int32), 0)
            is_dropped_B = is_equal_B & (rank_B <= dropped)
            first = tl.maximum(first, tl.max(tl.where(is_dropped_B, v_B + 1, 0), 0))
            seen += tl.sum(is_equal_B.to(tl.int32), 0)
    return first


@triton.jit
def weights_of(source, begin, best, floor, first, min_p, BLOCK: tl.constexpr):
    """[BLOCK] weights of what is kept from place `begin` on, float64; 0 of the rest. And their places."""
    s_B, v_B = scores_of(source, begin, BLOCK)
    weight_B = tl.exp(s_B - best).to(tl.float64)
    is_kept_B = (s_B > floor) | ((s_B == floor) & (v_B >= first))
    return tl.where(is_kept_B & (weight_B >= min_p), weight_B, 0.0), v_B


@triton.jit
def total_of(source, best, floor, first, min_p, BLOCK: tl.constexpr):
    """The weight of what is kept, float64, block by block."""
    total = tl.full([], 0.0, tl.float64)
    for begin in range(0, length_of(source), BLOCK):
        weight_B, _ = weights_of(source, begin, best, floor, first, min_p, BLOCK)
        total += tl.sum(weight_B, 0)
    return total


@triton.jit
def invert(source, best, floor, first, min_p, aim, BLOCK: tl.constexpr):
    """The place at which the weights' sum exceeds `aim`, which is less than their total."""
    below = tl.full([], 0.0, tl.float64)
    place = 0
    for begin in range(0, length_of(source), BLOCK):
        weight_B, v_B = weights_of(source, begin, best, floor, first, min_p, BLOCK)
        through = below + tl.sum(weight_B, 0)
        if (below <= aim) & (aim < through):
            sum_B = below + tl.cumsum(weight_B, 0)
            beyond = tl.min(tl.where((sum_B > aim) & (weight_B > 0), v_B, 2147483647), 0)
            # A running sum is rounded otherwise than a sum: it may end a little below it.
            place = tl.minimum(beyond, tl.max(tl.where(weight_B > 0, v_B, 0), 0))
        below = through
    return place
