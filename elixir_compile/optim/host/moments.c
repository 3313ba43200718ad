/* Moments in fewer bytes, between memory and a tile in the first-level cache; compiled behind `kernel.c`.

       form       first moment                second moment               scale of a block of 128 values
       bfloat16   bf16                        bf16                        none
       int8       linear, -127 to 127         its root, linear, 0 to 255  largest magnitude / 127 or 255

   `optim/precision.py` states the formulas; torch's ops there give the same bits. Nothing here is a fused multiply-add, so
   these bits do not depend on the processor. */

enum { BLOCK = 128 };
typedef enum { FLOAT32, BFLOAT16, INT8 } MomentForm;

typedef struct {
    void *exp_avg, *exp_avg_sq;
    float *exp_avg_scale, *exp_avg_sq_scale; /* one for each block */
    uint32_t key;                            /* of the noise, from the seed and the step */
    int form;
} Reduced;

/* How the weights of `reduced_adamw` are stored: fp32; fp32 and rounded in bf16 or fp16; split; or in bf16 alone. */
typedef enum { MASTER, MASTER_AND_BF16, MASTER_AND_FP16, SPLIT_MASTER, BF16_ALONE } WeightForm;

typedef struct {
    void *values;    /* fp32 masters, or the int16 low halves of split masters; NULL if bf16 is all there is */
    uint16_t *param; /* NULL for MASTER */
    int form;
} Weights;

/* The bits of the least and the greatest magnitude that a block of first moments, or of roots, may have when it is
   decoded. Smaller blocks become zeros: scales, their inverses and squares of roots then keep their bits. Greater ones
   become NaN. 2^-90, 1.75 * 2^127; 2^-50, 2^63. */
static const uint32_t LEAST = 37u << 23, GREATEST = 0x7f600000u;
static const uint32_t LEAST_ROOT = 77u << 23, GREATEST_ROOT = 190u << 23;

/* -- noise --------------------------------------------------------------------------------------------------------- */

/* A bijection of `first ^ key`, hence uniform over keys. The upper bits, which depend on all bits of both values, serve
   the second moment, which keeps its rounding errors longer; the lower serve the first. */
INLINE uint32_t noise_of(uint32_t first, uint32_t second, uint32_t key) {
    return (first ^ (second << 16 | second >> 16) ^ key) * 0x9e3779b1u;
}

/* The noise of a weight whose moments have `noise`: 16 bits. */
INLINE uint32_t weight_noise(uint32_t noise, uint32_t weight) {
    return ((noise ^ weight) * 0x85ebca77u) >> 16;
}

/* -- numbers ------------------------------------------------------------------------------------------------------- */

/* The bf16 for fp32 `bits`, with 16 bits of noise; every NaN becomes the same. */
INLINE uint16_t bf16_of(uint32_t bits, uint32_t noise) {
    return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + noise) >> 16);
}

/* The scale of a block and the factor that divides by it. Both are 0 for a block of zeros; a block with a NaN or an
   infinity has the scale NaN and the factor 0. */
typedef struct { float value, inverse; } Scale;

INLINE Scale scale_of(uint32_t most, const int is_root) {
    const float codes = is_root ? 255.0f : 127.0f;
    const float value = as_float(most) / codes, inverse = codes / as_float(most);
    const uint32_t decoded = as_bits(value * codes);
    if (decoded < (is_root ? LEAST_ROOT : LEAST)) return (Scale){0.0f, 0.0f};
    if (decoded > (is_root ? GREATEST_ROOT : GREATEST)) return (Scale){as_float(0x7fc00000u), 0.0f};
    return (Scale){value, inverse};
}

INLINE uint32_t most_of(const float *values, size_t n) {
    uint32_t most = 0;
    for (size_t i = 0; i < n; ++i) {
        uint32_t bits = as_bits(values[i]) & 0x7fffffffu;
        most = bits > most ? bits : most;
    }
    return most;
}

/* -- blocks -------------------------------------------------------------------------------------------------------- */

static void decode(float *restrict first, float *restrict second, const uint8_t *restrict codes,
                   const uint8_t *restrict root_codes, float scale, float root_scale, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        first[i] = (float)(int8_t)codes[i] * scale;
        const float root = (float)root_codes[i] * root_scale;
        second[i] = root * root;
    }
}

INLINE uint32_t code_of(float value, uint32_t noise) {
    return as_bits(value + as_float(0x43c00000u | (noise & 0x7fffu))) >> 15 ^ 0x80u; /* 15 bits behind the point */
}

/* The largest root is 255 within 2^-16, a tie that goes to even: without the last bit of the noise it gets the code
   255, always. */
INLINE uint32_t root_code_of(float value, uint32_t noise) {
    return as_bits(value + as_float(0x43800000u | (noise >> 17 & 0x7ffeu))) >> 15 & 0xffu;
}

/* Write the scale of a block, and zeros as the codes of a block that has none. */
INLINE void finish(uint8_t *codes, float *to, Scale scale, size_t n) {
    *to = scale.value;
    if (scale.inverse == 0.0f) memset(codes, 0, n);
}

/* A positive root never gets the code 0: the next step would divide what is left of the first moment by eps. */
INLINE void encode_block(uint8_t *restrict codes, uint8_t *restrict root_codes, const float *restrict first,
                         const float *restrict root, float inverse, float root_inverse, uint32_t key, size_t n) {
    uint32_t wide[BLOCK], wide_roots[BLOCK];
    for (size_t i = 0; i < n; ++i) {
        const float value = first[i], root_value = root[i];
        const uint32_t bits = as_bits(value), root_bits = as_bits(root_value), least = root_bits ? 1u : 0u;
        const uint32_t noise = noise_of(bits, root_bits, key);
        const uint32_t root_code = root_code_of(root_value * root_inverse, noise);
        wide[i] = code_of(value * inverse, noise);
        wide_roots[i] = root_code > least ? root_code : least;
    }
    for (size_t i = 0; i < n; ++i) codes[i] = (uint8_t)wide[i];
    for (size_t i = 0; i < n; ++i) root_codes[i] = (uint8_t)wide_roots[i];
}

static void encode(uint8_t *codes, uint8_t *root_codes, float *scales, float *root_scales, const float *first,
                   const float *root, uint32_t key, size_t n) {
    const Scale scale = scale_of(most_of(first, n), 0), root_scale = scale_of(most_of(root, n), 1);
    encode_block(codes, root_codes, first, root, scale.inverse, root_scale.inverse, key, n);
    finish(codes, scales, scale, n);
    finish(root_codes, root_scales, root_scale, n);
}

static void encode_bf16(uint16_t *restrict exp_avg, uint16_t *restrict exp_avg_sq, const float *restrict first,
                        const float *restrict second, uint32_t key, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        uint32_t noise = noise_of(as_bits(first[i]), as_bits(second[i]), key);
        exp_avg[i] = bf16_of(as_bits(first[i]), noise & 0xffffu);
        exp_avg_sq[i] = bf16_of(as_bits(second[i]), noise >> 16);
    }
}

/* The weights in bf16, rounded with noise from their moments. */
static void narrow_weights(uint16_t *restrict to, const float *restrict weights, const float *restrict first,
                           const float *restrict second, uint32_t key, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        uint32_t noise = noise_of(as_bits(first[i]), as_bits(second[i]), key);
        to[i] = bf16_of(as_bits(weights[i]), weight_noise(noise, as_bits(weights[i])));
    }
}
