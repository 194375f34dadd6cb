"""Two Triton kernels that compute the logits of a block of classes without writing them to memory.

`statistics_kernel` reduces the terms of the false logits of each row (`heads/losses/tile.py`).
`gradient_kernel` computes the same logits again and writes their gradient, from which two matrix
products compute the gradients of features and class rows.

Each program of the first kernel computes `BLOCK_G` rows and every `num_splits`-th group of
`BLOCK_C` classes. The statistics of the splits are merged by torch operations. For example, 8,192
rows are 64 groups of 128 rows; with 4 splits, 256 programs keep 132 multiprocessors busy. Programs
of the same classes follow each other, so that they read the class rows from the L2 cache.

The logits of a tile are x·w, times the factor of the class (1 / ||w|| for cosine logits), plus the
shift of the class (bias and prior). Products of float32 numbers have the precision "ieee", because
Triton's default is TF32.
"""

# Shape legend: G rows, C classes of a block, d features, N reductions, S splits.

from heads.optional_triton import interprets, jit, tl

# The interpreter cannot multiply bf16. Triton reads only globals that are `tl.constexpr`.
_WIDEN = tl.constexpr(interprets)
# Arguments that differ between the batches or blocks of a run. Triton would compile a kernel again
# for those that are 1 or a multiple of 16. `dim` and `num_classes` are specialized: rows of tensors
# are read and written 16 bytes at a time only if the compiler knows that they are aligned.
_VARYING = ("num_rows", "first_class", "first_split", "all_splits")

# ruff: noqa: RUF005  Triton does not support unpacking into a tuple.


@jit
def _logits(
    features,
    rows,
    factors,
    shifts,
    first_g,
    first_c,
    num_rows,
    num_classes,
    dim,
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Return the float32 logits [BLOCK_G, BLOCK_C] of the rows from `first_g` and the classes from
    `first_c`."""
    c = first_c + tl.arange(0, BLOCK_C)
    in_g = (first_g + tl.arange(0, BLOCK_G) < num_rows)[:, None]
    in_c = (c < num_classes)[None, :]
    # Offsets within a tile fit in 32 bits. 64-bit pointers would take 128 more registers.
    features += first_g.to(tl.int64) * dim
    rows += first_c.to(tl.int64) * dim
    d = tl.arange(0, BLOCK_D)
    of_x = tl.arange(0, BLOCK_G)[:, None] * dim + d[None, :]
    of_w = tl.arange(0, BLOCK_C)[None, :] * dim + d[:, None]
    z = tl.zeros([BLOCK_G, BLOCK_C], tl.float32)
    for start in range(0, dim, BLOCK_D):
        in_d = d < dim - start
        x = tl.load(features + start + of_x, in_g & in_d[None, :], 0.0)
        w = tl.load(rows + start + of_w, in_c & in_d[:, None], 0.0)
        if _WIDEN:
            x = x.to(tl.float32)
            w = w.to(tl.float32)
        z = tl.dot(x, w, z, input_precision="ieee")
    if factors is not None:
        z *= tl.load(factors + c, c < num_classes, 0.0)[None, :]
    if shifts is not None:
        z += tl.load(shifts + c, c < num_classes, 0.0)[None, :]
    return z


@jit
def _without_sets(z, labels, label_offsets, g, in_g, first_class, first_c, BLOCK_C: tl.constexpr):
    """Replace the logits z [BLOCK_G, BLOCK_C] of the classes in the sets of the rows `g` with -inf.

    A mask would need as many registers as the logits. Labels outside the tile are only loaded: with
    very many classes, most tiles contain no label.
    """
    c = first_c + tl.arange(0, BLOCK_C)
    start = tl.load(label_offsets + g, in_g, 0).to(tl.int32)
    num_labels = tl.load(label_offsets + g + 1, in_g, 0).to(tl.int32) - start
    for i in range(0, tl.max(num_labels, 0)):
        label = (tl.load(labels + start + i, i < num_labels, -1) - first_class).to(tl.int32)
        inside = (label >= first_c) & (label < first_c + BLOCK_C)
        if tl.max(inside.to(tl.int32), 0) > 0:
            z = tl.where(c[None, :] == label[:, None], float("-inf"), z)
    return z


@jit
def _finite(x):
    """Replace infinities with 0."""
    return tl.where(tl.abs(x) == float("inf"), 0.0, x)


@jit(do_not_specialize=_VARYING)
def statistics_kernel(
    features,  # [G, d]
    rows,  # [C, d]
    factors,  # [C] or None
    shifts,  # [C] or None
    labels,  # [P], the positions of the labels among the classes of this rank
    label_offsets,  # [G + 1], the offsets of the sets of labels, or None: one label per row
    totals,  # [N, all splits, G], output
    num_rows,
    num_classes,
    dim,
    first_class,  # the position of the block's first class
    first_split,  # the position of this block's first split in the outputs
    all_splits,  # the number of splits of all blocks
    TERMS: tl.constexpr,
    IS_LOGSUMEXP: tl.constexpr,  # of each reduction; the others are sums
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row_groups = tl.cdiv(num_rows, BLOCK_G)
    first_g = tl.program_id(0) % row_groups * BLOCK_G
    split = tl.program_id(0) // row_groups
    num_splits = tl.num_programs(0) // row_groups
    g = first_g + tl.arange(0, BLOCK_G)
    if label_offsets is None:
        label = tl.load(labels + g, g < num_rows, -1) - first_class
    sums = (tl.zeros([BLOCK_G], tl.float32),) * len(IS_LOGSUMEXP)
    tops = (tl.full([BLOCK_G], float("-inf"), tl.float32),) * len(IS_LOGSUMEXP)
    for tile in range(split, tl.cdiv(num_classes, BLOCK_C), num_splits):
        first_c = tile * BLOCK_C
        c = first_c + tl.arange(0, BLOCK_C)
        z = _logits(
            features, rows, factors, shifts, first_g, first_c, num_rows, num_classes, dim,
            BLOCK_G, BLOCK_C, BLOCK_D,
        )  # fmt: skip
        if label_offsets is None:
            is_false = (c < num_classes)[None, :] & (c[None, :] != label[:, None])
        else:
            z = _without_sets(
                z, labels, label_offsets, g, g < num_rows, first_class, first_c, BLOCK_C
            )
            is_false = (c < num_classes)[None, :] & (z != float("-inf"))
        terms = TERMS(z)
        new_sums = ()
        new_tops = ()
        for i in tl.static_range(len(IS_LOGSUMEXP)):
            if IS_LOGSUMEXP[i]:
                term = tl.where(is_false, terms[i], float("-inf"))
                top = tl.maximum(tops[i], tl.max(term, 1))
                shift = _finite(top)
                added = tl.sum(tl.exp(term - shift[:, None]), 1)
                new_sums = new_sums + (sums[i] * tl.exp(tops[i] - shift) + added,)
                new_tops = new_tops + (top,)
            else:
                new_sums = new_sums + (sums[i] + tl.sum(tl.where(is_false, terms[i], 0.0), 1),)
                new_tops = new_tops + (tops[i],)
        sums = new_sums
        tops = new_tops
    split += first_split
    for i in tl.static_range(len(IS_LOGSUMEXP)):
        total = sums[i]
        if IS_LOGSUMEXP[i]:
            total = tl.log(sums[i]) + _finite(tops[i])
        tl.store(totals + (i * all_splits + split).to(tl.int64) * num_rows + g, total, g < num_rows)


@jit(do_not_specialize=_VARYING)
def gradient_kernel(
    features,  # [G, d]
    rows,  # [C, d]
    factors,  # [C] or None
    shifts,  # [C] or None
    labels,  # [P], as in `statistics_kernel`
    label_offsets,
    totals,  # [N, G], over all splits
    grads,  # [N, G], of the totals
    out,  # [G, C], output: the gradient of the products x·w, 0 at the labels
    column_sums,  # [groups of rows, C], output: sums of the gradient of the logits, or None
    num_rows,
    num_classes,
    dim,
    first_class,
    SLOPES: tl.constexpr,
    TERMS: tl.constexpr,
    IS_LOGSUMEXP: tl.constexpr,  # of each reduction; the others are sums
    BLOCK_G: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row_groups = tl.cdiv(num_rows, BLOCK_G)
    row_group = tl.program_id(0) % row_groups
    first_g = row_group * BLOCK_G
    g = first_g + tl.arange(0, BLOCK_G)
    first_c = tl.program_id(0) // row_groups * BLOCK_C
    c = first_c + tl.arange(0, BLOCK_C)
    in_g = g < num_rows
    in_c = c < num_classes
    z = _logits(
        features, rows, factors, shifts, first_g, first_c, num_rows, num_classes, dim,
        BLOCK_G, BLOCK_C, BLOCK_D,
    )  # fmt: skip
    if label_offsets is not None:
        z = _without_sets(z, labels, label_offsets, g, in_g, first_class, first_c, BLOCK_C)
    terms = TERMS(z)
    slopes = SLOPES(z)
    grad = tl.zeros([BLOCK_G, BLOCK_C], tl.float32)
    for i in tl.static_range(len(IS_LOGSUMEXP)):
        weight = tl.load(grads + i * num_rows + g, in_g, 0.0)[:, None]
        if IS_LOGSUMEXP[i]:
            total = _finite(tl.load(totals + i * num_rows + g, in_g, 0.0))
            grad += weight * tl.exp(terms[i] - total[:, None]) * slopes[i]
        else:
            grad += weight * slopes[i]
    if label_offsets is None:
        label = tl.load(labels + g, in_g, -1) - first_class
        is_false = c[None, :] != label[:, None]
    else:
        is_false = z != float("-inf")
    grad = tl.where(in_g[:, None] & is_false, grad, 0.0)
    if column_sums is not None:  # the gradient is not yet rounded
        of_group = column_sums + row_group.to(tl.int64) * num_classes
        tl.store(of_group + c, tl.sum(grad, 0), in_c)
    if factors is not None:
        grad *= tl.load(factors + c, in_c, 0.0)[None, :]
    inside = in_g[:, None] & in_c[None, :]
    out += first_g.to(tl.int64) * num_classes + first_c
    of_out = tl.arange(0, BLOCK_G)[:, None] * num_classes + tl.arange(0, BLOCK_C)[None, :]
    tl.store(out + of_out, grad.to(out.dtype.element_ty), inside)
