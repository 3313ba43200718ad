/* One AdamW step with moments in fewer bytes: tiles of them become fp32 in the first-level cache, `update` runs on the
   tiles, and they are stored in their form again. With AVX-512, `lanes.c` does whole blocks in registers instead.
   Compiled behind `kernel.c`, `moments.c` and `lanes.c`. */

typedef struct {
    float slope[TILE], first[TILE], second[TILE], wide[TILE];
    uint16_t high[TILE] __attribute__((aligned(64)));
} Tiles;

/* Update the weights from `start` on with the moments `here`. */
static void update_tile(Weights weights, Tiles *tiles, const float *slope, Moments here, size_t start, size_t n,
                        const Coefficients *k, const Reduced *moments, int keeps_root) {
    float *master = (float *)weights.values + start;
    uint16_t *param = weights.param + start;
    if (weights.form == SPLIT_MASTER)
        updated((int16_t *)weights.values + start, param, slope, here, 0, n, k, SPLIT, keeps_root);
    else if (weights.form == MASTER_AND_BF16) {
        updated(master, tiles->high, slope, here, 0, n, k, ROUNDED, keeps_root);
        put(param, tiles->high, n);
    } else if (weights.form == BF16_ALONE) {
        widen_bf16(tiles->wide, param, n);
        updated(tiles->wide, NULL, slope, here, 0, n, k, WIDE, keeps_root);
        narrow_weights(param, tiles->wide, here.exp_avg, here.exp_avg_sq, moments->key, n);
    } else {
        updated(master, NULL, slope, here, 0, n, k, WIDE, keeps_root);
        if (weights.form == MASTER_AND_FP16) narrow_fp16(param, master, n);
    }
}

/* The step of a tile of moments without scales. */
static void step_plain(Weights weights, Tiles *tiles, const Reduced *moments, const float *slope, size_t start,
                       size_t n, const Coefficients *k) {
    uint16_t *exp_avg = (uint16_t *)moments->exp_avg + start, *exp_avg_sq = (uint16_t *)moments->exp_avg_sq + start;
    Moments here = {tiles->first, tiles->second, NULL};
    if (moments->form == FLOAT32) {
        here.exp_avg = (float *)moments->exp_avg + start, here.exp_avg_sq = (float *)moments->exp_avg_sq + start;
        update_tile(weights, tiles, slope, here, start, n, k, moments, 0);
        return;
    }
    widen_bf16(tiles->first, exp_avg, n);
    widen_bf16(tiles->second, exp_avg_sq, n);
    update_tile(weights, tiles, slope, here, start, n, k, moments, 0);
    encode_bf16(exp_avg, exp_avg_sq, tiles->first, tiles->second, moments->key, n);
}

/* The step of a tile of blocks, whose first begins at `start`. */
static void step_blocks(Weights weights, Tiles *tiles, const Reduced *moments, const float *slope, size_t start,
                        size_t n, const Coefficients *k) {
    uint8_t *codes = (uint8_t *)moments->exp_avg + start, *root_codes = (uint8_t *)moments->exp_avg_sq + start;
    float *scales = moments->exp_avg_scale + start / BLOCK, *root_scales = moments->exp_avg_sq_scale + start / BLOCK;
    const Moments here = {tiles->first, tiles->second, NULL};
    for (size_t at = 0, i = 0; at < n; at += BLOCK, ++i)
        decode(tiles->first + at, tiles->second + at, codes + at, root_codes + at, scales[i], root_scales[i],
               n - at < BLOCK ? n - at : BLOCK);
    update_tile(weights, tiles, slope, here, start, n, k, moments, 1);
    for (size_t at = 0, i = 0; at < n; at += BLOCK, ++i)
        encode(codes + at, root_codes + at, scales + i, root_scales + i, tiles->first + at, tiles->second + at,
               moments->key, n - at < BLOCK ? n - at : BLOCK);
}

/* Pointers are to the first of `n` elements, which begins a block. */
void reduced_adamw(Weights weights, Reduced moments, Gradient grad, size_t n, const Coefficients *k) {
    Tiles tiles;
    size_t done = 0;
#ifdef HAS_LANES
    if (moments.form != FLOAT32) {
        /* What has to be widened or narrowed in fp16 stays in the first-level cache between. */
        const int is_tiled = grad.kind == FP16 || weights.form == MASTER_AND_FP16;
        for (size_t length; done + BLOCK <= n; done += length) {
            length = !is_tiled ? n / BLOCK * BLOCK : n - done < TILE ? BLOCK : TILE;
            Group rest = group_at((Group){weights, grad.kind == BF16 ? grad.values : NULL, NULL}, done, weights.form);
            if (!rest.grad) rest.slope = widened(tiles.slope, grad, done, length);
            step_lanes(rest, &moments, done, length, k);
            if (weights.form == MASTER_AND_FP16)
                narrow_fp16(weights.param + done, (float *)weights.values + done, length);
        }
    }
#endif
    for (size_t start = done; start < n; start += TILE) {
        const size_t rest = n - start < TILE ? n - start : TILE;
        const float *slope = widened(tiles.slope, grad, start, rest);
        if (moments.form == INT8) step_blocks(weights, &tiles, &moments, slope, start, rest, k);
        else step_plain(weights, &tiles, &moments, slope, start, rest, k);
    }
    store_fence();
}
