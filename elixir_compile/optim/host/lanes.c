/* The step of moments in fewer bytes in AVX-512, whatever holds the weights, with the bits of `update`, `encode_block` and
   `encode_bf16`. Compiled behind `moments.c`.

   gcc 12 vectorises the loops of those functions, and even a single loop over all of them takes 1.5 times the time of
   this: two shifts and a conversion for each bf16 where one unpacking does, a shift for each that is packed where the
   packing can take the upper words, and a test for NaN of every value. Here one test of the weights stands for all: a
   moment that is NaN makes its weight NaN.

   64 elements are four vectors of fp32, in natural order beside fp32 masters. If all weights are 16-bit words, unpacking
   their low and high halves sets the order, which all arrays then share: 0.92 times the time of natural order, in which
   fp32 masters take 0.88 times the time.

       vector 0   0-3 8-11 16-19 24-27     vector 2   32-35 40-43 48-51 56-59
       vector 1   4-7 12-15 20-23 28-31    vector 3   36-39 44-47 52-55 60-63 */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VBMI__)
#define HAS_LANES 1

enum { GROUP = 64, VECTORS = 4 };
typedef __m512 Four[VECTORS];

typedef enum { UNPACKED, NATURAL } Order;

/* By order and element of 64, its byte among those that `packed` gathers. */
static const uint8_t BYTES[2][64] __attribute__((aligned(64))) = {
    {0, 1, 8, 9, 2, 3, 10, 11, 16, 17, 24, 25, 18, 19, 26, 27, 32, 33, 40, 41, 34, 35, 42, 43, 48, 49, 56, 57, 50, 51, 58, 59,
     4, 5, 12, 13, 6, 7, 14, 15, 20, 21, 28, 29, 22, 23, 30, 31, 36, 37, 44, 45, 38, 39, 46, 47, 52, 53, 60, 61, 54, 55, 62, 63},
    {0, 1, 8, 9, 16, 17, 24, 25, 32, 33, 40, 41, 48, 49, 56, 57, 2, 3, 10, 11, 18, 19, 26, 27, 34, 35, 42, 43, 50, 51, 58, 59,
     4, 5, 12, 13, 20, 21, 28, 29, 36, 37, 44, 45, 52, 53, 60, 61, 6, 7, 14, 15, 22, 23, 30, 31, 38, 39, 46, 47, 54, 55, 62, 63},
};
/* By order and element of 32, the low word of its lane in two vectors. */
static const uint16_t LOW_WORDS[2][32] __attribute__((aligned(64))) = {
    {0, 2, 4, 6, 32, 34, 36, 38, 8, 10, 12, 14, 40, 42, 44, 46, 16, 18, 20, 22, 48, 50, 52, 54, 24, 26, 28, 30, 56, 58, 60, 62},
    {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30, 32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62},
};
/* The words of the lower, and of the upper half of two vectors in turn. */
static const uint16_t IN_TURN[2][32] __attribute__((aligned(64))) = {
    {0, 32, 1, 33, 2, 34, 3, 35, 4, 36, 5, 37, 6, 38, 7, 39, 8, 40, 9, 41, 10, 42, 11, 43, 12, 44, 13, 45, 14, 46, 15, 47},
    {16, 48, 17, 49, 18, 50, 19, 51, 20, 52, 21, 53, 22, 54, 23, 55, 24, 56, 25, 57, 26, 58, 27, 59, 28, 60, 29, 61, 30, 62, 31, 63},
};

#define BITS(x) _mm512_castps_si512(x)
#define FLOATS(x) _mm512_castsi512_ps(x)
#define ALL(x) _mm512_set1_epi32((int)(x))
#define EACH for (int j = 0; j < VECTORS; ++j)

/* -- 64 elements between memory and vectors ------------------------------------------------------------------------ */

INLINE Order order_of(const int form) {
    return form == SPLIT_MASTER || form == BF16_ALONE ? UNPACKED : NATURAL;
}

/* 32 words as the upper halves of 32-bit lanes, whose lower halves come from `low`. */
INLINE void unpack(__m512 *to, __m512i low, __m512i high, const Order order) {
    if (order == NATURAL) {
        to[0] = FLOATS(_mm512_permutex2var_epi16(low, _mm512_load_si512(IN_TURN[0]), high));
        to[1] = FLOATS(_mm512_permutex2var_epi16(low, _mm512_load_si512(IN_TURN[1]), high));
    } else to[0] = FLOATS(_mm512_unpacklo_epi16(low, high)), to[1] = FLOATS(_mm512_unpackhi_epi16(low, high));
}

INLINE void load_bf16(Four to, const uint16_t *from, const Order order) {
    for (int half = 0; half < 2; ++half)
        unpack(to + 2 * half, _mm512_setzero_si512(), _mm512_loadu_si512(from + 32 * half), order);
}

INLINE void load_fp32(Four to, const float *from, const Order order) {
    for (int half = 0; half < 2; ++half) {
        const __m512 low = _mm512_loadu_ps(from + 32 * half), high = _mm512_loadu_ps(from + 32 * half + 16);
        to[2 * half] = order == NATURAL ? low : _mm512_shuffle_f32x4(low, high, 0x88);
        to[2 * half + 1] = order == NATURAL ? high : _mm512_shuffle_f32x4(low, high, 0xdd);
    }
}

INLINE __m512i low_words_of(const Order order) { return _mm512_load_si512(LOW_WORDS[order]); }

INLINE __m512i high_words_of(const Order order) {
    return _mm512_add_epi16(low_words_of(order), _mm512_set1_epi16(1));
}

/* Store the words of each lane that `words` names; past the caches if `is_past`, which needs alignment: see `put`. */
INLINE void store_words(uint16_t *to, const Four from, __m512i words, const int is_past) {
    for (int half = 0; half < 2; ++half) {
        const __m512i found = _mm512_permutex2var_epi16(BITS(from[2 * half]), words, BITS(from[2 * half + 1]));
        if (is_past) _mm512_stream_si512((void *)(to + 32 * half), found);
        else _mm512_storeu_si512(to + 32 * half, found);
    }
}

/* The bytes at bit `at` of each lane, in natural order. */
INLINE __m512i packed(const Four from, int at, const Order order) {
    const __m512i offsets = _mm512_set1_epi16((short)(at | (at + 32) << 8));
    __m512i found = _mm512_multishift_epi64_epi8(offsets, BITS(from[0]));
    found = _mm512_mask_multishift_epi64_epi8(found, 0x0c0c0c0c0c0c0c0cu, offsets, BITS(from[1]));
    found = _mm512_mask_multishift_epi64_epi8(found, 0x3030303030303030u, offsets, BITS(from[2]));
    found = _mm512_mask_multishift_epi64_epi8(found, 0xc0c0c0c0c0c0c0c0u, offsets, BITS(from[3]));
    return _mm512_permutexvar_epi8(_mm512_load_si512(BYTES[order]), found);
}

/* As upper bytes the codes are 2^24 times as large, which is exact. */
INLINE void decode_lanes(Four to, const uint8_t *codes, float scale, const int is_root, const Order order) {
    const __m512i zero = _mm512_setzero_si512(), halves = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i bytes = _mm512_permutexvar_epi64(halves, _mm512_loadu_si512(codes));
    unpack(to, zero, _mm512_unpacklo_epi8(zero, bytes), order);
    unpack(to + 2, zero, _mm512_unpackhi_epi8(zero, bytes), order);
    EACH to[j] = _mm512_mul_ps(is_root ? _mm512_cvtepu32_ps(BITS(to[j])) : _mm512_cvtepi32_ps(BITS(to[j])),
                               _mm512_set1_ps(scale * 0x1p-24f));
}

/* -- rounding ------------------------------------------------------------------------------------------------------ */

INLINE __m512i noise_lanes(__m512 first, __m512 second, __m512i key) {
    const __m512i mixed = _mm512_ternarylogic_epi32(BITS(first), _mm512_rol_epi32(BITS(second), 16), key, 0x96);
    return _mm512_mullo_epi32(mixed, ALL(0x9e3779b1u));
}

INLINE __m512 bf16_lanes(__m512 value, __m512i noise, int has_nan) {
    const __m512 rounded = FLOATS(_mm512_add_epi32(BITS(value), noise));
    if (!has_nan) return rounded;
    return _mm512_mask_mov_ps(rounded, _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q), FLOATS(ALL(0x7fc00000)));
}

/* Encode the 64 values of a block's half; `first` and `root` are the tiles. */
INLINE void encode_lanes(uint8_t *codes, uint8_t *root_codes, const float *first, const float *root, float inverse,
                         float root_inverse, __m512i key, const Order order) {
    Four code, root_code, least;
    EACH {
        const __m512 value = _mm512_load_ps(first + 16 * j), root_value = _mm512_load_ps(root + 16 * j);
        const __m512i noise = noise_lanes(value, root_value, key);
        const __m512 scaled = _mm512_mul_ps(value, _mm512_set1_ps(inverse));
        const __m512 root_scaled = _mm512_mul_ps(root_value, _mm512_set1_ps(root_inverse));
        /* (noise & mask) | base */
        const __m512i up = _mm512_ternarylogic_epi32(noise, ALL(0x7fff), ALL(0x43c00000), 0xea);
        const __m512i root_noise = _mm512_srli_epi32(noise, 17);
        const __m512i root_up = _mm512_ternarylogic_epi32(root_noise, ALL(0x7ffe), ALL(0x43800000), 0xea);
        code[j] = _mm512_add_ps(scaled, FLOATS(up)), root_code[j] = _mm512_add_ps(root_scaled, FLOATS(root_up));
    }
    const __m512i bytes = _mm512_xor_si512(packed(code, 15, order), _mm512_set1_epi8(-128));
    __m512i root_bytes = packed(root_code, 15, order);
    if (__builtin_expect(_mm512_testn_epi8_mask(root_bytes, root_bytes) != 0, 0)) {
        EACH least[j] = FLOATS(_mm512_min_epu32(_mm512_load_si512(root + 16 * j), ALL(1)));
        root_bytes = _mm512_max_epu8(root_bytes, packed(least, 0, order));
    }
    _mm512_storeu_si512(codes, bytes), _mm512_storeu_si512(root_codes, root_bytes);
}

/* -- the update ---------------------------------------------------------------------------------------------------- */

typedef struct {
    Weights weights;
    const uint16_t *grad;  /* in bf16; NULL if `slope` is used */
    const float *slope;
} Group;

/* The group that begins at element `at` of `all`, whose weights have the form `form`. */
INLINE Group group_at(Group all, size_t at, const int form) {
    if (form == SPLIT_MASTER) all.weights.values = (int16_t *)all.weights.values + at;
    else if (form != BF16_ALONE) all.weights.values = (float *)all.weights.values + at;
    if (form != MASTER) all.weights.param += at;
    if (all.grad) all.grad += at;
    if (all.slope) all.slope += at;
    return all;
}

/* Store the stepped weights of `group`; those in bf16 alone are rounded with noise from the moments. */
INLINE void store_weights(Group group, Four weight, const Four first, const Four second, __m512i key, int has_nan,
                          const int form) {
    const __m512i flip = _mm512_set1_epi16((short)0x8000), low_words = low_words_of(order_of(form));
    const __m512i high_words = high_words_of(order_of(form));
    int16_t *const lows = group.weights.values;
    if (form == SPLIT_MASTER) {
        EACH weight[j] = FLOATS(_mm512_add_epi32(BITS(weight[j]), ALL(0x8000)));
        for (int half = 0; half < 2; ++half) {
            const __m512i even = BITS(weight[2 * half]), odd = BITS(weight[2 * half + 1]);
            const __m512i low = _mm512_permutex2var_epi16(even, low_words, odd);
            _mm512_storeu_si512(lows + 32 * half, _mm512_xor_si512(low, flip));
        }
    } else if (form == BF16_ALONE)
        EACH {
            const __m512i noise = _mm512_xor_si512(noise_lanes(first[j], second[j], key), BITS(weight[j]));
            const __m512i up = _mm512_srli_epi32(_mm512_mullo_epi32(noise, ALL(0x85ebca77u)), 16);
            weight[j] = bf16_lanes(weight[j], up, has_nan);
        }
    else EACH _mm512_storeu_ps((float *)group.weights.values + 16 * j, weight[j]);
    if (form == MASTER_AND_BF16) { /* rounded, ties to even */
        EACH {
            const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(BITS(weight[j]), 16), ALL(1));
            weight[j] = FLOATS(_mm512_add_epi32(BITS(weight[j]), _mm512_add_epi32(odd, ALL(0x7fff))));
        }
        if ((uintptr_t)group.weights.param % 64 == 0) store_words(group.weights.param, weight, high_words, 1);
        else store_words(group.weights.param, weight, high_words, 0);
    } else if (form != MASTER) store_words(group.weights.param, weight, high_words, 0);
}

/* Step the weights of `group`, which have the form `form`, with `first` and `second` (its root if `keeps_root`), which
   become the new moments. Return whether a weight, and so maybe a moment, is NaN. */
INLINE int step_group(Group group, Four first, Four second, const Coefficients *k, __m512i key, const int keeps_root,
                      const int form) {
    Four weight, grad;
    const Order order = order_of(form);
    const __m512i flip = _mm512_set1_epi16((short)0x8000);
    uint16_t *const param = group.weights.param;
    int16_t *const lows = group.weights.values;
    if (group.grad) load_bf16(grad, group.grad, order);
    else load_fp32(grad, group.slope, order);
    if (form == SPLIT_MASTER) { /* the low half is signed: with its sign flipped it is 0x8000 too large, without a carry */
        for (int half = 0; half < 2; ++half)
            unpack(weight + 2 * half, _mm512_xor_si512(_mm512_loadu_si512(lows + 32 * half), flip),
                   _mm512_loadu_si512(param + 32 * half), order);
        EACH weight[j] = FLOATS(_mm512_sub_epi32(BITS(weight[j]), ALL(0x8000)));
    } else if (form == BF16_ALONE) load_bf16(weight, param, order);
    else load_fp32(weight, group.weights.values, order);
    EACH {
        const __m512 slope = _mm512_mul_ps(grad[j], _mm512_set1_ps(k->grad_factor));
        first[j] = _mm512_fmadd_ps(slope, _mm512_set1_ps(k->one_minus_beta1),
                                   _mm512_mul_ps(first[j], _mm512_set1_ps(k->beta1)));
        second[j] = _mm512_fmadd_ps(_mm512_mul_ps(slope, slope), _mm512_set1_ps(k->one_minus_beta2),
                                    _mm512_mul_ps(second[j], _mm512_set1_ps(k->beta2)));
        const __m512 root = _mm512_sqrt_ps(second[j]);
        if (keeps_root) second[j] = root;
        const __m512 below = _mm512_fmadd_ps(root, _mm512_set1_ps(k->inverse_correction2), _mm512_set1_ps(k->eps));
        const __m512 decay = _mm512_mul_ps(weight[j], _mm512_set1_ps(k->decay));
        weight[j] = _mm512_sub_ps(
            weight[j], _mm512_fmadd_ps(_mm512_set1_ps(k->step_size), _mm512_div_ps(first[j], below), decay));
    }
    const int has_nan = (_mm512_cmp_ps_mask(weight[0], weight[1], _CMP_UNORD_Q) |
                         _mm512_cmp_ps_mask(weight[2], weight[3], _CMP_UNORD_Q)) != 0;
    if (__builtin_expect(has_nan, 0))
        EACH weight[j] = _mm512_mask_mov_ps(weight[j], _mm512_cmp_ps_mask(weight[j], weight[j], _CMP_UNORD_Q),
                                            FLOATS(ALL(0x7fc00000)));
    store_weights(group, weight, first, second, key, has_nan, form);
    return has_nan;
}

INLINE void step_bf16_group(Group group, uint16_t *exp_avg, uint16_t *exp_avg_sq, const Coefficients *k, __m512i key,
                            const int form) {
    Four first, second;
    const __m512i high_words = high_words_of(order_of(form));
    load_bf16(first, exp_avg, order_of(form)), load_bf16(second, exp_avg_sq, order_of(form));
    const int has_nan = step_group(group, first, second, k, key, 0, form);
    EACH {
        const __m512i noise = noise_lanes(first[j], second[j], key);
        first[j] = bf16_lanes(first[j], _mm512_and_si512(noise, ALL(0xffff)), has_nan);
        second[j] = bf16_lanes(second[j], _mm512_srli_epi32(noise, 16), has_nan);
    }
    store_words(exp_avg, first, high_words, 0), store_words(exp_avg_sq, second, high_words, 0);
}

/* A block that is updated and not yet encoded. */
typedef struct {
    float first[BLOCK] __attribute__((aligned(64))), root[BLOCK] __attribute__((aligned(64)));
    Scale scale, root_scale;
} Updated;

/* Step a whole block of 128 elements whose group is the first, but for its codes and scales. */
INLINE void update_block(Updated *to, Group group, const uint8_t *codes, const uint8_t *root_codes, float scale,
                         float root_scale, const Coefficients *k, __m512i key, const int form) {
    __m512i most = _mm512_setzero_si512(), most_root = _mm512_setzero_si512();
    for (int at = 0; at < BLOCK; at += GROUP) {
        Four first, second;
        decode_lanes(first, codes + at, scale, 0, order_of(form));
        decode_lanes(second, root_codes + at, root_scale, 1, order_of(form));
        EACH second[j] = _mm512_mul_ps(second[j], second[j]);
        step_group(group_at(group, at, form), first, second, k, key, 1, form);
        EACH {
            most = _mm512_max_epu32(most, _mm512_and_si512(BITS(first[j]), ALL(0x7fffffff)));
            most_root = _mm512_max_epu32(most_root, _mm512_and_si512(BITS(second[j]), ALL(0x7fffffff)));
            _mm512_store_ps(to->first + at + 16 * j, first[j]), _mm512_store_ps(to->root + at + 16 * j, second[j]);
        }
    }
    to->scale = scale_of(_mm512_reduce_max_epu32(most), 0);
    to->root_scale = scale_of(_mm512_reduce_max_epu32(most_root), 1);
}

INLINE void encode_updated(const Reduced *moments, const Updated *from, size_t start, __m512i key, const Order order) {
    uint8_t *codes = (uint8_t *)moments->exp_avg + start, *root_codes = (uint8_t *)moments->exp_avg_sq + start;
    for (int at = 0; at < BLOCK; at += GROUP)
        encode_lanes(codes + at, root_codes + at, from->first + at, from->root + at, from->scale.inverse,
                     from->root_scale.inverse, key, order);
    finish(codes, moments->exp_avg_scale + start / BLOCK, from->scale, BLOCK);
    finish(root_codes, moments->exp_avg_sq_scale + start / BLOCK, from->root_scale, BLOCK);
}

/* Step `n` elements, a multiple of BLOCK, whose weights have the form `weights`; the first is the first of `all` and the
   element `start` of the moments. A block is encoded after the update of the next one, which runs while the scales of the
   first are found. */
INLINE void step_all(Group all, const Reduced *moments, size_t start, size_t n, const Coefficients *given,
                     const int form, const int weights) {
    const Coefficients own = *given, *k = &own; /* no store may change them, so they stay in registers */
    const __m512i key = ALL(moments->key);
    if (form == BFLOAT16) {
        for (size_t at = 0; at < n; at += GROUP)
            step_bf16_group(group_at(all, at, weights), (uint16_t *)moments->exp_avg + start + at,
                            (uint16_t *)moments->exp_avg_sq + start + at, k, key, weights);
        return;
    }
    Updated updated[2];
    size_t index = 0;
    for (size_t at = 0; at < n; at += BLOCK, ++index) {
        const size_t here = start + at;
        update_block(&updated[index & 1], group_at(all, at, weights), (uint8_t *)moments->exp_avg + here,
                     (uint8_t *)moments->exp_avg_sq + here, moments->exp_avg_scale[here / BLOCK],
                     moments->exp_avg_sq_scale[here / BLOCK], k, key, weights);
        if (index) encode_updated(moments, &updated[~index & 1], here - BLOCK, key, order_of(weights));
    }
    if (index) encode_updated(moments, &updated[~index & 1], start + n - BLOCK, key, order_of(weights));
}

static void step_lanes(Group all, const Reduced *moments, size_t start, size_t n, const Coefficients *k) {
    const int is_bf16 = moments->form == BFLOAT16;
#define STEP(weights) is_bf16 ? step_all(all, moments, start, n, k, BFLOAT16, weights) \
                              : step_all(all, moments, start, n, k, INT8, weights)
    switch (all.weights.form) {
    case MASTER_AND_BF16: STEP(MASTER_AND_BF16); break;
    case SPLIT_MASTER: STEP(SPLIT_MASTER); break;
    case BF16_ALONE: STEP(BF16_ALONE); break;
    default: STEP(MASTER); /* the caller narrows fp32 to fp16 */
    }
#undef STEP
}
#endif
