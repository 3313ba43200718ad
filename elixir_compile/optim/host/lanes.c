/* The step of split masters and of bf16 weights without a master, rounded with noise, in AVX-512, with the bits of
   `update`, `encode_block` and `encode_bf16`, which gcc 12 leaves at a half to a third of this rate. Compiled behind `moments.c`.

   64 elements are four vectors of fp32. Unpacking the low and the high words of 16-bit arrays sets their order, which
   all arrays then share:

       vector 0   0-3 8-11 16-19 24-27     vector 2   32-35 40-43 48-51 56-59
       vector 1   4-7 12-15 20-23 28-31    vector 3   36-39 44-47 52-55 60-63 */

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VBMI__)
#define HAS_LANES 1

enum { GROUP = 64, VECTORS = 4 };
typedef __m512 Four[VECTORS];

/* By element of 64, its byte among those that `packed` gathers; by element of 32, the low word of its lane. */
static const uint8_t TO_NATURAL[] __attribute__((aligned(64))) = {
    0, 1, 8, 9, 2, 3, 10, 11, 16, 17, 24, 25, 18, 19, 26, 27, 32, 33, 40, 41, 34, 35, 42, 43, 48, 49, 56, 57, 50, 51, 58, 59,
    4, 5, 12, 13, 6, 7, 14, 15, 20, 21, 28, 29, 22, 23, 30, 31, 36, 37, 44, 45, 38, 39, 46, 47, 52, 53, 60, 61, 54, 55, 62, 63,
};
static const uint16_t LOW_WORDS[] __attribute__((aligned(64))) = {
    0, 2, 4, 6, 32, 34, 36, 38, 8, 10, 12, 14, 40, 42, 44, 46, 16, 18, 20, 22, 48, 50, 52, 54, 24, 26, 28, 30, 56, 58, 60, 62,
};

#define BITS(x) _mm512_castps_si512(x)
#define FLOATS(x) _mm512_castsi512_ps(x)
#define ALL(x) _mm512_set1_epi32((int)(x))
#define EACH for (int j = 0; j < VECTORS; ++j)

/* -- 64 elements between memory and vectors ------------------------------------------------------------------------ */

/* Words as the upper halves of 32-bit lanes, whose lower halves come from `low`. */
INLINE void unpack(Four to, __m512i low0, __m512i high0, __m512i low1, __m512i high1) {
    to[0] = FLOATS(_mm512_unpacklo_epi16(low0, high0)), to[1] = FLOATS(_mm512_unpackhi_epi16(low0, high0));
    to[2] = FLOATS(_mm512_unpacklo_epi16(low1, high1)), to[3] = FLOATS(_mm512_unpackhi_epi16(low1, high1));
}

INLINE void load_bf16(Four to, const uint16_t *from) {
    const __m512i zero = _mm512_setzero_si512();
    unpack(to, zero, _mm512_loadu_si512(from), zero, _mm512_loadu_si512(from + 32));
}

INLINE void load_fp32(Four to, const float *from) {
    for (int half = 0; half < 2; ++half) {
        const __m512 low = _mm512_loadu_ps(from + 32 * half), high = _mm512_loadu_ps(from + 32 * half + 16);
        to[2 * half] = _mm512_shuffle_f32x4(low, high, 0x88), to[2 * half + 1] = _mm512_shuffle_f32x4(low, high, 0xdd);
    }
}

/* Store the words of each lane that `words` names. */
INLINE void store_words(uint16_t *to, const Four from, __m512i words) {
    for (int half = 0; half < 2; ++half)
        _mm512_storeu_si512(to + 32 * half, _mm512_permutex2var_epi16(BITS(from[2 * half]), words,
                                                                      BITS(from[2 * half + 1])));
}

/* The bytes at bit `at` of each lane, in natural order. */
INLINE __m512i packed(const Four from, int at) {
    const __m512i offsets = _mm512_set1_epi16((short)(at | (at + 32) << 8));
    __m512i found = _mm512_multishift_epi64_epi8(offsets, BITS(from[0]));
    found = _mm512_mask_multishift_epi64_epi8(found, 0x0c0c0c0c0c0c0c0cu, offsets, BITS(from[1]));
    found = _mm512_mask_multishift_epi64_epi8(found, 0x3030303030303030u, offsets, BITS(from[2]));
    found = _mm512_mask_multishift_epi64_epi8(found, 0xc0c0c0c0c0c0c0c0u, offsets, BITS(from[3]));
    return _mm512_permutexvar_epi8(_mm512_load_si512(TO_NATURAL), found);
}

/* As upper bytes the codes are 2^24 times as large, which is exact. */
INLINE void decode_lanes(Four to, const uint8_t *codes, float scale, const int is_root) {
    const __m512i zero = _mm512_setzero_si512(), order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i bytes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
    unpack(to, zero, _mm512_unpacklo_epi8(zero, bytes), zero, _mm512_unpackhi_epi8(zero, bytes));
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
                         float root_inverse, __m512i key) {
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
    const __m512i bytes = _mm512_xor_si512(packed(code, 15), _mm512_set1_epi8(-128));
    __m512i root_bytes = packed(root_code, 15);
    if (__builtin_expect(_mm512_testn_epi8_mask(root_bytes, root_bytes) != 0, 0)) {
        EACH least[j] = FLOATS(_mm512_min_epu32(_mm512_load_si512(root + 16 * j), ALL(1)));
        root_bytes = _mm512_max_epu8(root_bytes, packed(least, 0));
    }
    _mm512_storeu_si512(codes, bytes), _mm512_storeu_si512(root_codes, root_bytes);
}

/* -- the update ---------------------------------------------------------------------------------------------------- */

typedef struct {
    uint16_t *param;       /* the high halves, or all there is of the weights */
    int16_t *low;          /* NULL without a master */
    const uint16_t *grad;  /* in bf16; NULL if `slope` is used */
    const float *slope;
} Group;

/* Step the weights of `group` with `second` (its root if `keeps_root`) and `first`, which become the new moments. Return
   whether a weight, and so maybe a moment, is NaN. */
INLINE int step_group(Group group, Four first, Four second, const Coefficients *k, __m512i key, const int keeps_root,
                      const int is_split) {
    Four weight, grad;
    const __m512i flip = _mm512_set1_epi16((short)0x8000);
    if (group.grad) load_bf16(grad, group.grad);
    else load_fp32(grad, group.slope);
    if (is_split) { /* the low half is signed: with its sign flipped it is 0x8000 too large, and no carry is needed */
        const __m512i low0 = _mm512_loadu_si512(group.low), low1 = _mm512_loadu_si512(group.low + 32);
        unpack(weight, _mm512_xor_si512(low0, flip), _mm512_loadu_si512(group.param), _mm512_xor_si512(low1, flip),
               _mm512_loadu_si512(group.param + 32));
        EACH weight[j] = FLOATS(_mm512_sub_epi32(BITS(weight[j]), ALL(0x8000)));
    } else load_bf16(weight, group.param);
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
    const __m512i low_words = _mm512_load_si512(LOW_WORDS);
    if (is_split) {
        EACH weight[j] = FLOATS(_mm512_add_epi32(BITS(weight[j]), ALL(0x8000)));
        for (int half = 0; half < 2; ++half) {
            const __m512i even = BITS(weight[2 * half]), odd = BITS(weight[2 * half + 1]);
            const __m512i low = _mm512_permutex2var_epi16(even, low_words, odd);
            _mm512_storeu_si512(group.low + 32 * half, _mm512_xor_si512(low, flip));
        }
    } else
        EACH {
            const __m512i noise = _mm512_xor_si512(noise_lanes(first[j], second[j], key), BITS(weight[j]));
            const __m512i up = _mm512_srli_epi32(_mm512_mullo_epi32(noise, ALL(0x85ebca77u)), 16);
            weight[j] = bf16_lanes(weight[j], up, has_nan);
        }
    store_words(group.param, weight, _mm512_add_epi16(low_words, _mm512_set1_epi16(1)));
    return has_nan;
}

INLINE void step_bf16_group(Group group, uint16_t *exp_avg, uint16_t *exp_avg_sq, const Coefficients *k, __m512i key,
                            const int is_split) {
    Four first, second;
    const __m512i high_words = _mm512_add_epi16(_mm512_load_si512(LOW_WORDS), _mm512_set1_epi16(1));
    load_bf16(first, exp_avg), load_bf16(second, exp_avg_sq);
    const int has_nan = step_group(group, first, second, k, key, 0, is_split);
    EACH {
        const __m512i noise = noise_lanes(first[j], second[j], key);
        first[j] = bf16_lanes(first[j], _mm512_and_si512(noise, ALL(0xffff)), has_nan);
        second[j] = bf16_lanes(second[j], _mm512_srli_epi32(noise, 16), has_nan);
    }
    store_words(exp_avg, first, high_words), store_words(exp_avg_sq, second, high_words);
}

/* A block that is updated and not yet encoded. */
typedef struct {
    float first[BLOCK] __attribute__((aligned(64))), root[BLOCK] __attribute__((aligned(64)));
    Scale scale, root_scale;
} Updated;

/* Step a whole block of 128 elements whose group is the first, but for its codes and scales. */
INLINE void update_block(Updated *to, Group group, const uint8_t *codes, const uint8_t *root_codes, float scale,
                         float root_scale, const Coefficients *k, __m512i key, const int is_split) {
    __m512i most = _mm512_setzero_si512(), most_root = _mm512_setzero_si512();
    for (int at = 0; at < BLOCK; at += GROUP) {
        Four first, second;
        decode_lanes(first, codes + at, scale, 0);
        decode_lanes(second, root_codes + at, root_scale, 1);
        EACH second[j] = _mm512_mul_ps(second[j], second[j]);
        const Group here = {group.param + at, is_split ? group.low + at : NULL, group.grad ? group.grad + at : NULL,
                            group.slope + at};
        step_group(here, first, second, k, key, 1, is_split);
        EACH {
            most = _mm512_max_epu32(most, _mm512_and_si512(BITS(first[j]), ALL(0x7fffffff)));
            most_root = _mm512_max_epu32(most_root, _mm512_and_si512(BITS(second[j]), ALL(0x7fffffff)));
            _mm512_store_ps(to->first + at + 16 * j, first[j]), _mm512_store_ps(to->root + at + 16 * j, second[j]);
        }
    }
    to->scale = scale_of(_mm512_reduce_max_epu32(most), 0);
    to->root_scale = scale_of(_mm512_reduce_max_epu32(most_root), 1);
}

INLINE void encode_updated(const Reduced *moments, const Updated *from, size_t start, __m512i key) {
    uint8_t *codes = (uint8_t *)moments->exp_avg + start, *root_codes = (uint8_t *)moments->exp_avg_sq + start;
    for (int at = 0; at < BLOCK; at += GROUP)
        encode_lanes(codes + at, root_codes + at, from->first + at, from->root + at, from->scale.inverse,
                     from->root_scale.inverse, key);
    finish(codes, moments->exp_avg_scale + start / BLOCK, from->scale, BLOCK);
    finish(root_codes, moments->exp_avg_sq_scale + start / BLOCK, from->root_scale, BLOCK);
}

/* Step `n` elements, a multiple of BLOCK, of split masters, or of bf16 weights if `low` is NULL. A block is encoded after
   the update of the next one, which runs while the scales of the first are found. */
INLINE void step_all(Group all, const Reduced *moments, size_t start, size_t n, const Coefficients *given,
                     const int form, const int is_split) {
    const Coefficients own = *given, *k = &own; /* no store may change them, so they stay in registers */
    const __m512i key = ALL(moments->key);
    Updated updated[2];
    size_t at = start, index = 0;
    for (; at < start + n; at += form == BFLOAT16 ? GROUP : BLOCK, ++index) {
        const Group group = {all.param + at, is_split ? all.low + at : NULL, all.grad ? all.grad + at : NULL,
                             all.slope + (at - start)};
        if (form == BFLOAT16) {
            step_bf16_group(group, (uint16_t *)moments->exp_avg + at, (uint16_t *)moments->exp_avg_sq + at, k, key,
                            is_split);
            continue;
        }
        update_block(&updated[index & 1], group, (uint8_t *)moments->exp_avg + at, (uint8_t *)moments->exp_avg_sq + at,
                     moments->exp_avg_scale[at / BLOCK], moments->exp_avg_sq_scale[at / BLOCK], k, key, is_split);
        if (index) encode_updated(moments, &updated[~index & 1], at - BLOCK, key);
    }
    if (form != BFLOAT16 && index)
        encode_updated(moments, &updated[~index & 1], at - BLOCK, key);
}

static void step_lanes(Group all, const Reduced *moments, size_t start, size_t n, const Coefficients *k) {
    const int is_split = all.low != NULL, form = moments->form;
    if (form == BFLOAT16 && is_split) step_all(all, moments, start, n, k, BFLOAT16, 1);
    if (form == BFLOAT16 && !is_split) step_all(all, moments, start, n, k, BFLOAT16, 0);
    if (form == INT8 && is_split) step_all(all, moments, start, n, k, INT8, 1);
    if (form == INT8 && !is_split) step_all(all, moments, start, n, k, INT8, 0);
}
#endif
