/* Moments in fewer bytes, between memory and a tile in the first-level cache; compiled behind `kernel.c`.

       form       first moment                second moment               scale of a block of 128 values
       bfloat16   bf16                        bf16                        none
       float8     e4m3                        its root, e4m3              a power of two
       int8       linear, -127 to 127         its root, linear, 0 to 255  largest magnitude / 127 or 255

   `moment_forms.py` states the formulas; torch's ops there give the same bits. Nothing here is a fused multiply-add, so
   these bits do not depend on the processor. */

enum { BLOCK = 128 };
typedef enum { FLOAT32, BFLOAT16, FLOAT8, INT8 } MomentForm;

typedef struct {
    void *exp_avg, *exp_avg_sq;
    float *exp_avg_scale, *exp_avg_sq_scale; /* one for each block */
    uint32_t key;                            /* of the noise, from the seed and the step */
    int form;
} Reduced;

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

/* The e4m3 of a magnitude of at most 448, with 20 bits of noise. Below 2^-6 the numbers are 2^-9 apart, as are fp32
   numbers with 19 bits less behind 2^-5. */
INLINE uint32_t float8_of(float magnitude, uint32_t noise) {
    uint32_t bits = as_bits(magnitude);
    uint32_t normal = (bits + noise - (120u << 23)) >> 20;
    uint32_t tiny = (as_bits(magnitude + as_float(0x3d000000u | noise >> 1)) - 0x3d000000u) >> 19;
    return bits < 121u << 23 ? tiny : normal;
}

INLINE float float8_value(uint32_t code) {
    uint32_t magnitude = code & 0x7fu, bits = (magnitude << 20) + (120u << 23);
    float tiny = as_float(bits + (1u << 23)) - 0x1p-6f;
    return as_float((magnitude < 8 ? as_bits(tiny) : bits) | (code & 0x80u) << 24);
}

/* The scale of a block and the factor that divides by it. Both are 0 for a block of zeros; a block with a NaN or an
   infinity has the scale NaN and the factor 0. */
typedef struct { float value, inverse; } Scale;

INLINE Scale scale_of(uint32_t most, const int form, const int is_root) {
    const float codes = is_root ? 255.0f : 127.0f;
    float value = as_float(most) / codes, inverse = codes / as_float(most);
    if (form == FLOAT8) { /* the largest lands in (224, 448] */
        uint32_t exponent = ((most + 0x1fffffu) >> 23) - 8;
        value = as_float(exponent << 23), inverse = as_float((254 - exponent) << 23);
    }
    uint32_t decoded = form == FLOAT8 ? most : as_bits(value * codes);
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

INLINE void decode_block(float *restrict first, float *restrict second, const uint8_t *restrict codes,
                         const uint8_t *restrict root_codes, float scale, float root_scale, size_t n, const int form) {
    for (size_t i = 0; i < n; ++i) {
        first[i] = (form == FLOAT8 ? float8_value(codes[i]) : (float)(int8_t)codes[i]) * scale;
        float root = (form == FLOAT8 ? float8_value(root_codes[i]) : (float)root_codes[i]) * root_scale;
        second[i] = root * root;
    }
}

/* A positive root never gets the code 0: the next step would divide what is left of the first moment by eps. */
INLINE uint32_t code_of(float value, uint32_t bits, uint32_t noise, const int form) {
    if (form == FLOAT8) return float8_of(__builtin_fabsf(value), noise & 0xfffffu) | (bits >> 24 & 0x80u);
    return as_bits(value + as_float(0x43c00000u | (noise & 0x7fffu))) >> 15 ^ 0x80u; /* 15 bits behind the point */
}

/* The largest int8 root is 255 within 2^-16, a tie that goes to even: without the last bit of the noise it gets the code
   255, always. */
INLINE uint32_t root_code_of(float value, uint32_t noise, const int form) {
    if (form == FLOAT8) return float8_of(value, noise >> 12);
    return as_bits(value + as_float(0x43800000u | (noise >> 17 & 0x7ffeu))) >> 15 & 0xffu;
}

/* A positive root never gets the code 0: the next step would divide what is left of the first moment by eps. */
INLINE void encode_block(uint8_t *restrict codes, uint8_t *restrict root_codes, const float *restrict first,
                         const float *restrict root, float inverse, float root_inverse, uint32_t key, size_t n,
                         const int form) {
    uint32_t wide[BLOCK], wide_roots[BLOCK];
    for (size_t i = 0; i < n; ++i) {
        const float value = first[i], root_value = root[i];
        const uint32_t bits = as_bits(value), root_bits = as_bits(root_value), least = root_bits ? 1u : 0u;
        const uint32_t noise = noise_of(bits, root_bits, key);
        const uint32_t root_code = root_code_of(root_value * root_inverse, noise, form);
        wide[i] = code_of(value * inverse, bits, noise, form);
        wide_roots[i] = root_code > least ? root_code : least;
    }
    for (size_t i = 0; i < n; ++i) codes[i] = (uint8_t)wide[i];
    for (size_t i = 0; i < n; ++i) root_codes[i] = (uint8_t)wide_roots[i];
}

static void decode(float *first, float *second, const uint8_t *codes, const uint8_t *root_codes, float scale,
                   float root_scale, size_t n, int form) {
    if (form == FLOAT8) decode_block(first, second, codes, root_codes, scale, root_scale, n, FLOAT8);
    else decode_block(first, second, codes, root_codes, scale, root_scale, n, INT8);
}

/* Divide the scale by 2 and double all codes, if the largest is that of 224: 448 is then the largest, as it is if the
   decoded block is encoded again. */
static void normalise(uint8_t *codes, float *scale, size_t n) {
    for (size_t i = 0; i < n; ++i)
        if ((codes[i] & 0x7fu) > 0x76u) return;
    for (size_t i = 0; i < n; ++i) {
        const unsigned magnitude = codes[i] & 0x7fu;
        codes[i] = (uint8_t)((codes[i] & 0x80u) | (magnitude < 8 ? 2 * magnitude : magnitude + 8));
    }
    *scale *= 0.5f;
}

/* Write the scale and correct the codes of blocks that have none. */
INLINE void finish(uint8_t *codes, float *to, Scale scale, uint32_t most, size_t n, int form) {
    *to = scale.value;
    if (scale.inverse == 0.0f) memset(codes, 0, n);
    else if (form == FLOAT8 && (most & 0x700000u) == 0x600000u) normalise(codes, to, n); /* between 224 and 240 */
}

static void encode(uint8_t *codes, uint8_t *root_codes, float *scales, float *root_scales, const float *first,
                   const float *root, uint32_t key, size_t n, int form) {
    const uint32_t most = most_of(first, n), most_root = most_of(root, n);
    const Scale scale = scale_of(most, form, 0), root_scale = scale_of(most_root, form, 1);
    const float inverse = scale.inverse, root_inverse = root_scale.inverse;
    if (form == FLOAT8) encode_block(codes, root_codes, first, root, inverse, root_inverse, key, n, FLOAT8);
    else encode_block(codes, root_codes, first, root, inverse, root_inverse, key, n, INT8);
    finish(codes, scales, scale, most, n, form);
    finish(root_codes, root_scales, root_scale, most_root, n, form);
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
