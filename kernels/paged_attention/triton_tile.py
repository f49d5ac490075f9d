"""What the decode and the prefill kernel share: keys from pages or from this step, and the running softmax.

Shape suffixes: M query rows (tokens x the heads that share a key head), N keys, W rows to write. A tensor of rows
comes as a pair (main, rest), and WIDTHS is (width, power of two for main, power of two for rest or 0): see `triton.py`.

Tuples that travel together:
    operands  pointers of q, k, v, k_cache, v_cache; strides: theirs
    extras    pointers of sinks, alibi_slopes, rel_bias, or None
    queries   pos_M, first_M (first position seen), is_row_M, slope_M, rel_ptr_M (of distance 0), its stride
    SCORE     softcap or 0, whether there are slopes, the reach W of rel_bias or 0, whether a score is the product times
              a positive scale and nothing else
    state     of the softmax: top_M (maximum so far), sum_M, and the weighted values
"""

# mypy: disable-error-code="no-untyped-def, misc"
from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def first_key(pos, WINDOW: tl.constexpr, CHUNK: tl.constexpr):
    """The first position that a query at `pos` sees."""
    first = pos * 0
    if WINDOW > 0:
        first = tl.maximum(first, pos - WINDOW + 1)
    if CHUNK > 0:
        first = tl.maximum(first, pos // CHUNK * CHUNK)
    return first


@triton.jit
def which_heads(g, AXIS: tl.constexpr, GROUP: tl.constexpr, SHARE: tl.constexpr):
    """Of this program (on axis AXIS), for its g-th head: the key head, the head, whether it is one, how many there are.

    A key head's GROUP of heads is shared out to programs of SHARE heads each, the last of which may have fewer.
    """
    PARTS: tl.constexpr = (GROUP + SHARE - 1) // SHARE
    kv_head, part = tl.program_id(AXIS) // PARTS, tl.program_id(AXIS) % PARTS
    in_group = part * SHARE + g
    num_heads = tl.num_programs(AXIS) // PARTS * GROUP
    return kv_head, kv_head * GROUP + in_group, (g < SHARE) & (in_group < GROUP), num_heads


@triton.jit
def load_part(
    ptr, offsets, valid, stride, FROM: tl.constexpr, PART: tl.constexpr, END: tl.constexpr
):
    """[rows, PART] elements FROM.. of the rows at these offsets; 0 from END on and where invalid (None: nowhere)."""
    column = FROM + tl.arange(0, PART)
    from_ptr = ptr + offsets[:, None] + column[None, :] * stride
    if valid is not None:
        return tl.load(from_ptr, mask=valid[:, None] & (column < END)[None, :], other=0.0)
    elif FROM + PART > END:
        return tl.load(from_ptr, mask=(column < END)[None, :], other=0.0)
    else:
        return tl.load(from_ptr)


@triton.jit
def store_part(
    ptr, x, offsets, valid, stride, FROM: tl.constexpr, PART: tl.constexpr, END: tl.constexpr
):
    """The counterpart of `load_part`."""
    column = FROM + tl.arange(0, PART)
    mask = valid[:, None] & (column < END)[None, :]
    to = ptr + offsets[:, None] + column[None, :] * stride
    tl.store(to, x.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def load_rows(ptr, offsets, valid, stride, WIDTHS: tl.constexpr):
    """The pair (main, rest) of rows; without a rest, main stands in its place."""
    main = load_part(ptr, offsets, valid, stride, 0, WIDTHS[1], WIDTHS[0])
    rest = main
    if WIDTHS[2] > 0:
        rest = load_part(ptr, offsets, valid, stride, WIDTHS[1], WIDTHS[2], WIDTHS[0])
    return main, rest


@triton.jit
def store_rows(ptr, x, offsets, valid, stride, WIDTHS: tl.constexpr):
    """The counterpart of `load_rows`."""
    store_part(ptr, x[0], offsets, valid, stride, 0, WIDTHS[1], WIDTHS[0])
    if WIDTHS[2] > 0:
        store_part(ptr, x[1], offsets, valid, stride, WIDTHS[1], WIDTHS[2], WIDTHS[0])


@triton.jit
def load_queries(
    operands, strides, extras, rel_strides, token_M, head_M, is_row_M, pos_M,
    WINDOW: tl.constexpr, CHUNK: tl.constexpr, D: tl.constexpr,
):  # fmt: skip
    """Queries of the rows (main, rest), and `queries`: what else their scores depend on."""
    token_M = token_M.to(tl.int64)
    stride_n, stride_h, stride_d = strides[0]
    at_M = token_M * stride_n + head_M * stride_h
    q = load_rows(operands[0], at_M, is_row_M, stride_d, D)
    slope_M = pos_M  # stands in, unused: None cannot be returned
    if extras[1] is not None:
        slope_M = tl.load(extras[1] + head_M, mask=is_row_M, other=0.0).to(tl.float32)
    rel_ptr_M = pos_M
    if extras[2] is not None:
        rel_ptr_M = extras[2] + token_M * rel_strides[0] + head_M * rel_strides[1]
    first_M = first_key(pos_M, WINDOW, CHUNK)
    return q, (pos_M, first_M, is_row_M, slope_M, rel_ptr_M, rel_strides[2])


@triton.jit
def empty_state(sinks_ptr, with_sink, head_M, is_row_M, M: tl.constexpr, DV: tl.constexpr):
    """The softmax before any key. A sink counts as a key without a value."""
    top_M = tl.full([M], float("-inf"), tl.float32)
    sum_M = tl.zeros([M], tl.float32)
    if sinks_ptr is not None:
        sink_M = tl.load(sinks_ptr + head_M, mask=is_row_M, other=0.0).to(tl.float32)
        top_M = tl.where(with_sink, sink_M * LOG2E, top_M)
        sum_M = tl.where(with_sink, 1.0, sum_M)
    MAIN: tl.constexpr = DV[1]
    REST: tl.constexpr = DV[2]
    main = tl.zeros([M, MAIN], tl.float32)
    rest = main
    if REST > 0:
        rest = tl.zeros([M, REST], tl.float32)
    return top_M, sum_M, (main, rest)


@triton.jit
def shape_scores(s_MN, queries, pos_N, valid_N, scale, SCORE: tl.constexpr):
    """Products of queries and keys -> scores, -inf where a key is not seen: in units of log 2, or plain ones unscaled.

    Without `valid_N` all keys are seen by all rows.
    """
    pos_M, first_M = queries[0], queries[1]
    distance_MN = pos_M[:, None] - pos_N[None, :]
    if not SCORE[3]:
        s_MN = bend_scores(s_MN * scale, queries, distance_MN, SCORE) * LOG2E
    if valid_N is not None:
        seen_MN = valid_N[None, :] & (distance_MN >= 0) & (pos_N[None, :] >= first_M[:, None])
        s_MN = tl.where(seen_MN, s_MN, float("-inf"))
    return s_MN


@triton.jit
def bend_scores(s_MN, queries, distance_MN, SCORE: tl.constexpr):
    """What softcap, slopes and biases by distance make of scores."""
    _, _, is_row_M, slope_M, rel_ptr_M, stride_rel = queries
    if SCORE[0] > 0:
        # tanh, which Triton has no portable name for; right also where exp2 is 0 or infinite.
        s_MN = SCORE[0] - 2 * SCORE[0] / (tl.exp2(s_MN * (2 * LOG2E / SCORE[0])) + 1)
    if SCORE[1]:
        s_MN -= (
            slope_M[:, None] * distance_MN
        )  # slope * key position, less a constant of the query's
    if SCORE[2] > 0:
        near_MN = (distance_MN >= 0) & (distance_MN < SCORE[2]) & is_row_M[:, None]
        at_MN = rel_ptr_M[:, None] + distance_MN * stride_rel
        s_MN += tl.load(at_MN, mask=near_MN, other=0.0).to(tl.float32)
    return s_MN


@triton.jit
def attend(
    state, q, queries, k_rows, v_rows, pos_N, valid_N, scale,
    SCORE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Take N more keys into the running softmax. k_rows, v_rows: (pointer, offsets_N, stride of an element).

    An invalid key is not even loaded: a weight of zero would not silence a NaN. Three tf32 products give float32's
    precision on tensor cores; "ieee" would unroll into minutes of compiling at wide heads. A plain score is scaled
    as the maximum is taken from it, in one instruction.
    """
    top_M, sum_M, acc = state
    acc_main, acc_rest = acc
    k = load_rows(k_rows[0], k_rows[1], valid_N, k_rows[2], D)
    s_MN = tl.dot(q[0], tl.trans(k[0]), input_precision="tf32x3")
    if D[2] > 0:
        s_MN += tl.dot(q[1], tl.trans(k[1]), input_precision="tf32x3")
    s_MN = shape_scores(s_MN, queries, pos_N, valid_N, scale, SCORE)
    top_M, sum_M, p_MN, fade_M = weigh(top_M, sum_M, s_MN, scale, SCORE)
    v = load_rows(v_rows[0], v_rows[1], valid_N, v_rows[2], DV)
    p_MN = p_MN.to(v[0].dtype)
    acc_main = acc_main * fade_M[:, None] + tl.dot(p_MN, v[0], input_precision="tf32x3")
    if DV[2] > 0:
        acc_rest = acc_rest * fade_M[:, None] + tl.dot(p_MN, v[1], input_precision="tf32x3")
    else:
        acc_rest = acc_main
    return top_M, sum_M, (acc_main, acc_rest)


@triton.jit
def weigh(top_M, sum_M, s_MN, scale, SCORE: tl.constexpr):
    """The running softmax with N more scores: maximum and sum, the scores' weights, what the old values fade by."""
    unit = 1.0
    if SCORE[3]:
        unit = scale * LOG2E
    new_top_M = tl.maximum(top_M, tl.max(s_MN, 1) * unit)
    # A row that has seen no key yet: -inf - -inf would be NaN.
    shift_M = tl.where(new_top_M == float("-inf"), 0.0, new_top_M)
    p_MN = tl.exp2(s_MN * unit - shift_M[:, None])
    fade_M = tl.exp2(top_M - shift_M)
    return new_top_M, sum_M * fade_M + tl.sum(p_MN, 1), p_MN, fade_M


@triton.jit
def attend_history(
    state, q, queries, operands, strides, table_ptr, kv_head, begin, end, scale,
    SCORE: tl.constexpr, PAGE_SIZE: tl.constexpr,
    D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr = False,
):  # fmt: skip
    """Attend to the positions begin..end-1 in the pages of `table_ptr`. Offsets have 64 bits: pools are large.

    With ALL these are whole tiles of N keys that all rows see.
    """
    k_page, k_slot, k_head, k_element = strides[3]
    v_page, v_slot, v_head, v_element = strides[4]
    for n in range(begin, end, N):
        pos_N = n + tl.arange(0, N)
        valid_N = None if ALL else pos_N < end
        page_N = tl.load(table_ptr + pos_N // PAGE_SIZE, mask=valid_N).to(tl.int64)
        slot_N = pos_N % PAGE_SIZE
        k_N = page_N * k_page + slot_N * k_slot + kv_head * k_head
        v_N = page_N * v_page + slot_N * v_slot + kv_head * v_head
        state = attend(
            state, q, queries, (operands[3], k_N, k_element), (operands[4], v_N, v_element), pos_N, valid_N,
            scale, SCORE, D, DV,
        )  # fmt: skip
    return state


@triton.jit
def attend_shared_history(
    state, q, queries, operands, strides, table_ptr, kv_head, begin, end, scale,
    SCORE: tl.constexpr, PAGE_SIZE: tl.constexpr, D: tl.constexpr, N: tl.constexpr,
):  # fmt: skip
    """`attend_history` where a value is the main part of its key: a row is read once for both products.

    Products with the keys as their rows would fill a tensor core's better where heads are few, but Triton 3.6 made
    wrong results of them on an H200.
    """
    k_page, k_slot, k_head, k_element = strides[3]
    top_M, sum_M, acc = state
    acc_main = acc[0]
    for n in range(begin, end, N):
        pos_N = n + tl.arange(0, N)
        valid_N = pos_N < end
        page_N = tl.load(table_ptr + pos_N // PAGE_SIZE, mask=valid_N).to(tl.int64)
        k_N = page_N * k_page + pos_N % PAGE_SIZE * k_slot + kv_head * k_head
        k = load_rows(operands[3], k_N, valid_N, k_element, D)
        s_MN = tl.dot(q[0], tl.trans(k[0]))
        if D[2] > 0:
            s_MN += tl.dot(q[1], tl.trans(k[1]))
        s_MN = shape_scores(s_MN, queries, pos_N, valid_N, scale, SCORE)
        top_M, sum_M, p_MN, fade_M = weigh(top_M, sum_M, s_MN, scale, SCORE)
        acc_main = acc_main * fade_M[:, None] + tl.dot(p_MN.to(k[0].dtype), k[0])
    return top_M, sum_M, (acc_main, acc_main)


@triton.jit
def attend_new(
    state, q, queries, operands, strides, row_of_0, kv_head, begin, end, scale,
    SCORE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, N: tl.constexpr, ALL: tl.constexpr = False,
):  # fmt: skip
    """Attend to the positions begin..end-1 that are this step's: position p is row row_of_0 + p of k and v.

    ALL as above.
    """
    k_row, k_head, k_element = strides[1]
    v_row, v_head, v_element = strides[2]
    for n in range(begin, end, N):
        pos_N = n + tl.arange(0, N)
        row_N = (row_of_0 + pos_N).to(tl.int64)
        k_N = row_N * k_row + kv_head * k_head
        v_N = row_N * v_row + kv_head * v_head
        state = attend(
            state, q, queries, (operands[1], k_N, k_element), (operands[2], v_N, v_element), pos_N,
            None if ALL else pos_N < end, scale, SCORE, D, DV,
        )  # fmt: skip
    return state


@triton.jit
def write_rows(
    operands, strides, slot_mapping_ptr, token_W, valid_W, kv_head,
    PAGE_SIZE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr,
):  # fmt: skip
    """Write these tokens' keys and values of a key head to their pages."""
    slot_W = tl.load(slot_mapping_ptr + token_W, mask=valid_W, other=0)
    page_W, row_W = slot_W // PAGE_SIZE, slot_W % PAGE_SIZE
    token_W = token_W.to(tl.int64)
    k = load_rows(
        operands[1], token_W * strides[1][0] + kv_head * strides[1][1], valid_W, strides[1][2], D
    )
    v = load_rows(
        operands[2], token_W * strides[2][0] + kv_head * strides[2][1], valid_W, strides[2][2], DV
    )
    k_W = page_W * strides[3][0] + row_W * strides[3][1] + kv_head * strides[3][2]
    v_W = page_W * strides[4][0] + row_W * strides[4][1] + kv_head * strides[4][2]
    store_rows(operands[3], k, k_W, valid_W, strides[3][3], D)
    store_rows(operands[4], v, v_W, valid_W, strides[4][3], DV)
