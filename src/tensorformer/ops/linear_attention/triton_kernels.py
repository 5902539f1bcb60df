"""Linear attention in three kernels: the states between chunks, what a chunk puts out, and the gradients of a chunk.

A chunk is one tile of steps. Between chunks goes the state, φ(x) built a tile of features at a time; inside of one,
Gram matrices, whose products are the scores of two branches. Degree 1 is degree 2 with a first branch of one channel
that holds 1 and is never read. Everything is float32 in registers, and of type DOT where it enters a product.
Cumulated decays, of base 2 and from the start of each chunk, come in two parts, whole octaves and a fraction of at
most a half: differences of the first are exact and of the second small, so that no exponential is off by more than
the last digit, however strong the decay.
"""

from __future__ import annotations

from typing import no_type_check

import triton
import triton.language as tl

COUNTS = ("first", "last", "chunks", "time", "count", "heads")  # for which one compiled kernel is enough


@triton.jit
@no_type_check
def rows(pointer, t, there, t_stride, column, inside, column_stride):
    """Return steps × columns of an operand, zero outside of it."""
    at = t.to(tl.int64)[:, None] * t_stride + column.to(tl.int64)[None, :] * column_stride
    return tl.load(pointer + at, mask=there[:, None] & inside[None, :], other=0.0)


@triton.jit
@no_type_check
def state_at(pointer, index, feature, value, feature_count, value_count):
    """Return the place, and what of it is there, of features × values in the state of that index."""
    whole = index.to(tl.int64) * feature_count * value_count
    at = whole + feature.to(tl.int64)[:, None] * value_count + value[None, :]
    return pointer + at, (feature < feature_count)[:, None] & (value < value_count)[None, :]


@triton.jit
@no_type_check
def features(x1_pointer, x1_t, x1_d, x2_pointer, x2_t, x2_d, t, there, feature, K1, K2, DEGREE: tl.constexpr):
    """Return φ of these steps at these features, in float32."""
    inside = feature < K1 * K2
    phi = rows(x2_pointer, t, there, x2_t, feature % K2, inside, x2_d).to(tl.float32)
    if DEGREE == 2:
        phi *= rows(x1_pointer, t, there, x1_t, feature // K2, inside, x1_d).to(tl.float32)
    return phi


@triton.jit
@no_type_check
def factor_of(x, DOT: tl.constexpr, PRECISION: tl.constexpr):
    """Return x as a product takes it."""
    x = x.to(DOT)
    if PRECISION == "tf32":
        # Tensor cores cut off the last 13 bits instead of rounding. A NaN may be all ones, and would become zero.
        rounded = (x.to(tl.int32, bitcast=True) + (1 << 12)) & -(1 << 13)
        x = tl.where(x == x, rounded.to(tl.float32, bitcast=True), x)
    return x


@triton.jit
@no_type_check
def dot(a, b, DOT: tl.constexpr, PRECISION: tl.constexpr):
    a, b = factor_of(a, DOT, PRECISION), factor_of(b, DOT, PRECISION)
    return tl.dot(a, b, input_precision=PRECISION)


@triton.jit
@no_type_check
def exponent_at(octave_pointer, fraction_pointer, index, step, STEPS: tl.constexpr):
    """Return both parts of the decay cumulated from the start of a chunk into a step of it."""
    at = index.to(tl.int64) * STEPS + step
    return tl.load(octave_pointer + at), tl.load(fraction_pointer + at)


@triton.jit
@no_type_check
def pairs(octave_pointer, fraction_pointer, index, STEPS: tl.constexpr, DECAY: tl.constexpr):
    """Return the decay from each step of a chunk (column) to each that is not before it (row), zero elsewhere."""
    step = tl.arange(0, STEPS)
    before = step[:, None] < step[None, :]
    if DECAY:
        octave, fraction = exponent_at(octave_pointer, fraction_pointer, index, step, STEPS)
        octaves = tl.where(before, -float("inf"), octave[:, None] - octave[None, :])
        return tl.exp2(octaves) * tl.exp2(fraction[:, None] - fraction[None, :])
    return tl.where(before, 0.0, 1.0)


@triton.jit
@no_type_check
def gram(
    q_pointer, q_t, q_d, k_pointer, k_t, k_d, t, there, K, WIDE: tl.constexpr, DOT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Return the products of the queries and the keys of one branch."""
    channel = tl.arange(0, WIDE)
    q = rows(q_pointer, t, there, q_t, channel, channel < K, q_d)
    k = rows(k_pointer, t, there, k_t, channel, channel < K, k_d)
    return dot(q, tl.trans(k), DOT, PRECISION)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def advance(
    x1_pointer, x1_b, x1_t, x1_h, x1_d,
    x2_pointer, x2_b, x2_t, x2_h, x2_d,
    v_pointer, v_b, v_t, v_h, v_d,
    carry_pointer, kept_pointer, octave_pointer, fraction_pointer,
    first, last, chunks, time, count, heads, K1, K2, V,
    STEPS: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr,
    DEGREE: tl.constexpr, DECAY: tl.constexpr, KEPT: tl.constexpr, REVERSED: tl.constexpr,
):  # fmt: skip
    """Carry a tile of the state over the chunks first..last, and keep what it was before each.

    With keys and values it is the state; REVERSED, from the last chunk to the first, with queries and gradients of y,
    it is the state's gradient.
    """
    program = tl.program_id(0)
    value_blocks, feature_blocks = tl.cdiv(V, VALUES), tl.cdiv(K1 * K2, FEATURES)
    n = program // (value_blocks * feature_blocks)
    value = program % value_blocks * VALUES + tl.arange(0, VALUES)
    feature = program // value_blocks % feature_blocks * FEATURES + tl.arange(0, FEATURES)
    b, h = (n // heads).to(tl.int64), (n % heads).to(tl.int64)
    x1_pointer += b * x1_b + h * x1_h
    x2_pointer += b * x2_b + h * x2_h
    v_pointer += b * v_b + h * v_h
    step = tl.arange(0, STEPS)
    carry_at, inside = state_at(carry_pointer, n, feature, value, K1 * K2, V)
    s = tl.load(carry_at, mask=inside, other=0.0)
    for turn in range(first, last):
        c = turn
        if REVERSED:
            c = first + last - 1 - turn
        if KEPT:
            kept_at, _ = state_at(kept_pointer, (c - first).to(tl.int64) * count + n, feature, value, K1 * K2, V)
            tl.store(kept_at, s.to(kept_pointer.dtype.element_ty), mask=inside)
        t = c * STEPS + step
        there = t < time
        phi = features(x1_pointer, x1_t, x1_d, x2_pointer, x2_t, x2_d, t, there, feature, K1, K2, DEGREE)
        v = rows(v_pointer, t, there, v_t, value, value < V, v_d)
        if DECAY:
            index = n.to(tl.int64) * chunks + c
            octave, fraction = exponent_at(octave_pointer, fraction_pointer, index, step, STEPS)
            octave_end, fraction_end = exponent_at(octave_pointer, fraction_pointer, index, STEPS - 1, STEPS)
            s *= tl.exp2(octave_end) * tl.exp2(fraction_end)
            if REVERSED:
                weight = tl.exp2(octave) * tl.exp2(fraction)
            else:
                weight = tl.exp2(octave_end - octave) * tl.exp2(fraction_end - fraction)
            phi *= weight[:, None]
        s += dot(tl.trans(phi), v, DOT, PRECISION)
    tl.store(carry_at, s, mask=inside)


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def outputs(
    q1_pointer, q1_b, q1_t, q1_h, q1_d,
    q2_pointer, q2_b, q2_t, q2_h, q2_d,
    k1_pointer, k1_b, k1_t, k1_h, k1_d,
    k2_pointer, k2_b, k2_t, k2_h, k2_d,
    v_pointer, v_b, v_t, v_h, v_d,
    y_pointer, kept_pointer, octave_pointer, fraction_pointer,
    first, last, chunks, time, count, heads, K1, K2, V,
    STEPS: tl.constexpr, FEATURES: tl.constexpr, VALUES: tl.constexpr, WIDE1: tl.constexpr, WIDE2: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, DEGREE: tl.constexpr, DECAY: tl.constexpr, BEFORE: tl.constexpr,
):  # fmt: skip
    """Write y of a chunk of first..last at a tile of values. BEFORE: something comes before the first chunk."""
    program = tl.program_id(0)
    value_blocks = tl.cdiv(V, VALUES)
    value = program % value_blocks * VALUES + tl.arange(0, VALUES)
    c = first + program // value_blocks % (last - first)
    n = program // value_blocks // (last - first)
    b, h = (n // heads).to(tl.int64), (n % heads).to(tl.int64)
    q1_pointer += b * q1_b + h * q1_h
    q2_pointer += b * q2_b + h * q2_h
    k1_pointer += b * k1_b + h * k1_h
    k2_pointer += b * k2_b + h * k2_h
    step = tl.arange(0, STEPS)
    t = c * STEPS + step
    there = t < time
    index = n.to(tl.int64) * chunks + c
    y = tl.zeros((STEPS, VALUES), tl.float32)
    if BEFORE:
        for start in range(0, K1 * K2, FEATURES):
            feature = start + tl.arange(0, FEATURES)
            phi = features(q1_pointer, q1_t, q1_d, q2_pointer, q2_t, q2_d, t, there, feature, K1, K2, DEGREE)
            kept_at, inside = state_at(kept_pointer, (c - first).to(tl.int64) * count + n, feature, value, K1 * K2, V)
            y += dot(phi, tl.load(kept_at, mask=inside, other=0.0), DOT, PRECISION)
        if DECAY:
            octave, fraction = exponent_at(octave_pointer, fraction_pointer, index, step, STEPS)
            y *= (tl.exp2(octave) * tl.exp2(fraction))[:, None]
    scores = pairs(octave_pointer, fraction_pointer, index, STEPS, DECAY)
    scores *= gram(q2_pointer, q2_t, q2_d, k2_pointer, k2_t, k2_d, t, there, K2, WIDE2, DOT, PRECISION)
    if DEGREE == 2:
        scores *= gram(q1_pointer, q1_t, q1_d, k1_pointer, k1_t, k1_d, t, there, K1, WIDE1, DOT, PRECISION)
    v = rows(v_pointer + b * v_b + h * v_h, t, there, v_t, value, value < V, v_d)
    y += dot(scores, v, DOT, PRECISION)
    at = ((b * time + t) * heads + h)[:, None] * V + value[None, :]
    tl.store(y_pointer + at, y.to(y_pointer.dtype.element_ty), mask=there[:, None] & (value < V)[None, :])


@triton.jit(do_not_specialize=COUNTS)
@no_type_check
def gradients(
    q1_pointer, q1_b, q1_t, q1_h, q1_d,
    q2_pointer, q2_b, q2_t, q2_h, q2_d,
    k1_pointer, k1_b, k1_t, k1_h, k1_d,
    k2_pointer, k2_b, k2_t, k2_h, k2_d,
    v_pointer, v_b, v_t, v_h, v_d,
    dy_pointer, dy_b, dy_t, dy_h, dy_d,
    dq1_pointer, dq2_pointer, dk1_pointer, dk2_pointer, dv_pointer,
    kept_pointer, d_kept_pointer, into_pointer, past_pointer, octave_pointer, fraction_pointer,
    first, last, chunks, time, count, heads, K1, K2, V,
    STEPS: tl.constexpr, VALUES: tl.constexpr, WIDE1: tl.constexpr, WIDE2: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, DEGREE: tl.constexpr, DECAY: tl.constexpr, D_DECAY: tl.constexpr,
    BEFORE: tl.constexpr, AFTER: tl.constexpr,
):  # fmt: skip
    """Write the gradients of a chunk of first..last, given the state before it and the gradient of that after it.

    D_DECAY: also those of its decays. A decay stands between pairs, each counted where it is met and none taken
    back: two states, a state and a step, two steps. Of step t, `into` holds what belongs to the decay of t,
    `past` what belongs to that of t + 1.
    """
    program = tl.program_id(0)
    c = first + program % (last - first)
    n = program // (last - first)
    b, h = (n // heads).to(tl.int64), (n % heads).to(tl.int64)
    q1_pointer += b * q1_b + h * q1_h
    q2_pointer += b * q2_b + h * q2_h
    k1_pointer += b * k1_b + h * k1_h
    k2_pointer += b * k2_b + h * k2_h
    v_pointer += b * v_b + h * v_h
    dy_pointer += b * dy_b + h * dy_h
    step = tl.arange(0, STEPS)
    t = c * STEPS + step
    there = t < time
    row = (b * time + t) * heads + h
    index = n.to(tl.int64) * chunks + c
    state = (c - first).to(tl.int64) * count + n
    if DECAY:
        octave, fraction = exponent_at(octave_pointer, fraction_pointer, index, step, STEPS)
        octave_end, fraction_end = exponent_at(octave_pointer, fraction_pointer, index, STEPS - 1, STEPS)
        enter = tl.exp2(octave) * tl.exp2(fraction)
        leave = tl.exp2(octave_end - octave) * tl.exp2(fraction_end - fraction)
    scores = pairs(octave_pointer, fraction_pointer, index, STEPS, DECAY)
    scores *= gram(q2_pointer, q2_t, q2_d, k2_pointer, k2_t, k2_d, t, there, K2, WIDE2, DOT, PRECISION)
    if DEGREE == 2:
        scores *= gram(q1_pointer, q1_t, q1_d, k1_pointer, k1_t, k1_d, t, there, K1, WIDE1, DOT, PRECISION)
        channel1 = tl.arange(0, WIDE1)
        dq1 = tl.zeros((STEPS, WIDE1), tl.float32)
        dk1 = tl.zeros((STEPS, WIDE1), tl.float32)
    channel2 = tl.arange(0, WIDE2)
    q2 = rows(q2_pointer, t, there, q2_t, channel2, channel2 < K2, q2_d)
    k2 = rows(k2_pointer, t, there, k2_t, channel2, channel2 < K2, k2_d)
    dq2 = tl.zeros((STEPS, WIDE2), tl.float32)
    dk2 = tl.zeros((STEPS, WIDE2), tl.float32)
    d_scores = tl.zeros((STEPS, STEPS), tl.float32)
    met = tl.zeros((WIDE2, VALUES), tl.float32)
    for start in range(0, V, VALUES):
        value = start + tl.arange(0, VALUES)
        v = rows(v_pointer, t, there, v_t, value, value < V, v_d)
        dy = rows(dy_pointer, t, there, dy_t, value, value < V, dy_d)
        d_scores += dot(dy, tl.trans(v), DOT, PRECISION)
        dv = tl.zeros((STEPS, VALUES), tl.float32)
        for i in range(K1):
            # The features whose first factor is channel i. Row by row of the state both factors' gradients add up.
            only = i + tl.arange(0, 1)
            feature = tl.where(channel2 < K2, i * K2 + channel2, K1 * K2)
            if BEFORE:
                s_at, inside = state_at(kept_pointer, state, feature, value, K1 * K2, V)
                s = tl.load(s_at, mask=inside, other=0.0)
                d_phi = dot(dy, tl.trans(s), DOT, PRECISION)
                if DECAY:
                    d_phi *= enter[:, None]
                if DEGREE == 2:
                    factor = rows(q1_pointer, t, there, q1_t, only, only < K1, q1_d).to(tl.float32)
                    dq1 += tl.where(channel1[None, :] == only[:, None], tl.sum(d_phi * q2, 1)[:, None], 0.0)
                    d_phi *= factor
                dq2 += d_phi
            if AFTER:
                ds_at, inside = state_at(d_kept_pointer, state, feature, value, K1 * K2, V)
                ds = tl.load(ds_at, mask=inside, other=0.0)
                d_phi = dot(v, tl.trans(ds), DOT, PRECISION)
                sent = dot(k2, ds, DOT, PRECISION)
                if DECAY:
                    d_phi *= leave[:, None]
                if DEGREE == 2:
                    factor = rows(k1_pointer, t, there, k1_t, only, only < K1, k1_d).to(tl.float32)
                    dk1 += tl.where(channel1[None, :] == only[:, None], tl.sum(d_phi * k2, 1)[:, None], 0.0)
                    d_phi *= factor
                    sent *= factor
                dk2 += d_phi
                dv += sent
            if D_DECAY and BEFORE and AFTER:
                met += s.to(tl.float32) * ds.to(tl.float32)
        if DECAY:
            dv *= leave[:, None]
        dv += dot(tl.trans(scores), dy, DOT, PRECISION)
        at = row[:, None] * V + value[None, :]
        tl.store(dv_pointer + at, dv.to(dv_pointer.dtype.element_ty), mask=there[:, None] & (value < V)[None, :])
    if D_DECAY:
        # Both sums are over the steps after the decay, then over those before it; the diagonal is behind both.
        into = tl.cumsum(tl.sum(q2 * dq2, 1), 0, reverse=True)
        into += tl.sum(tl.sum(met, 1), 0) * tl.exp2(octave_end) * tl.exp2(fraction_end)
        past = tl.cumsum(tl.sum(k2 * dk2, 1), 0)
        before = tl.cumsum(scores * d_scores, 1)
        past += tl.sum(tl.where(step[:, None] > step[None, :], before, 0.0), 0)
        tl.store(into_pointer + index * STEPS + step, into)
        tl.store(past_pointer + index * STEPS + step, past)
    # Gram matrices are made again: there are no registers to hold them through the loop.
    d_scores *= pairs(octave_pointer, fraction_pointer, index, STEPS, DECAY)
    d_gram = d_scores
    if DEGREE == 2:
        d_gram = d_scores * gram(q2_pointer, q2_t, q2_d, k2_pointer, k2_t, k2_d, t, there, K2, WIDE2, DOT, PRECISION)
        q1 = rows(q1_pointer, t, there, q1_t, channel1, channel1 < K1, q1_d)
        k1 = rows(k1_pointer, t, there, k1_t, channel1, channel1 < K1, k1_d)
        dq1 += dot(d_gram, k1, DOT, PRECISION)
        dk1 += dot(tl.trans(d_gram), q1, DOT, PRECISION)
        at = row[:, None] * K1 + channel1[None, :]
        inside = there[:, None] & (channel1 < K1)[None, :]
        tl.store(dq1_pointer + at, dq1.to(dq1_pointer.dtype.element_ty), mask=inside)
        tl.store(dk1_pointer + at, dk1.to(dk1_pointer.dtype.element_ty), mask=inside)
        d_gram = d_scores * dot(q1, tl.trans(k1), DOT, PRECISION)
    dq2 += dot(d_gram, k2, DOT, PRECISION)
    dk2 += dot(tl.trans(d_gram), q2, DOT, PRECISION)
    at = row[:, None] * K2 + channel2[None, :]
    inside = there[:, None] & (channel2 < K2)[None, :]
    tl.store(dq2_pointer + at, dq2.to(dq2_pointer.dtype.element_ty), mask=inside)
    tl.store(dk2_pointer + at, dk2.to(dk2_pointer.dtype.element_ty), mask=inside)
