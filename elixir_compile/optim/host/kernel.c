/* One AdamW step over flat host memory, each byte read and written once.

       mixed   gradient 16 or 32 bit -> master fp32, moments fp32 (in place) -> parameter 16 bit
       split   the same; the bf16 parameter is the high half of the master, and an int16 its low half

   Also: the sum of the squares of a gradient. Sizes are in elements.

   Every multiply-add is written out and the compiler contracts none (-ffp-contract=off), so that an element gets the
   same bits in the body of a loop, in its tail, at any split between threads, and in both forms of the master. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#define INLINE static inline __attribute__((always_inline))

typedef struct {
    float step_size;            /* lr / bias_correction1 */
    float inverse_correction2;  /* 1 / sqrt(bias_correction2) */
    float beta1, one_minus_beta1;
    float beta2, one_minus_beta2;
    float eps;
    float decay;                /* lr * weight_decay */
    float grad_factor;          /* scale and clip; negative to maximize */
} Coefficients;

typedef struct {
    float *exp_avg, *exp_avg_sq;
    float *max_exp_avg_sq;      /* NULL without amsgrad */
} Moments;

typedef enum { BF16, FP16, FP32 } Kind;

typedef struct {
    const void *values;
    int kind;
} Gradient;

/* The number of elements that are widened and updated together, in the first-level cache. A tile reads longer runs from
   each array than a single loop over all arrays does. One core of a Zen 4 with 60 M parameters reached this share of the
   rate of a loop that only reads and writes the same bytes:

       tile            64    128    256   (a single loop)
       mixed         0.92   0.99   1.00       0.98
       split         0.77   0.93   1.00       0.90 */
enum { TILE = 256 };

/* -- numbers ------------------------------------------------------------------------------------------------------- */

INLINE float as_float(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

INLINE uint32_t as_bits(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* a * b + c. */
INLINE float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}

#if defined(__F16C__)

/* Compilers do not vectorise this with F16C themselves (gcc 12). Fewer than 8 last elements use a padded copy. */
static void widen_fp16(float *restrict to, const uint16_t *restrict from, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
    if (i < n) {
        uint16_t rest[8] = {0};
        float wide[8];
        memcpy(rest, from + i, (n - i) * sizeof *from);
        _mm256_storeu_ps(wide, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)rest)));
        memcpy(to + i, wide, (n - i) * sizeof *to);
    }
}

static void narrow_fp16(uint16_t *restrict to, const float *restrict from, size_t n) {
    size_t i = 0;
    for (; i + 8 <= n; i += 8)
        _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), _MM_FROUND_TO_NEAREST_INT));
    if (i < n) {
        float rest[8] = {0};
        uint16_t narrow[8];
        memcpy(rest, from + i, (n - i) * sizeof *from);
        _mm_storeu_si128((__m128i *)narrow, _mm256_cvtps_ph(_mm256_loadu_ps(rest), _MM_FROUND_TO_NEAREST_INT));
        memcpy(to + i, narrow, (n - i) * sizeof *to);
    }
}

#else

/* Without branches, so that the loops vectorise. After Giesen, "Half to float done quick" and its reverse. */
static void widen_fp16(float *restrict to, const uint16_t *restrict from, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        uint32_t magnitude = (uint32_t)(from[i] & 0x7fffu) << 13, sign = (uint32_t)(from[i] & 0x8000u) << 16;
        uint32_t bits = as_bits(as_float(magnitude) * 0x1p112f); /* right below infinity, subnormals included */
        bits = magnitude >= 0x7c00u << 13 ? magnitude | 0x7f800000u : bits;
        to[i] = as_float(bits | sign);
    }
}

static void narrow_fp16(uint16_t *restrict to, const float *restrict from, size_t n) {
    for (size_t i = 0; i < n; ++i) {
        uint32_t bits = as_bits(from[i]), sign = bits & 0x80000000u, magnitude = bits ^ sign;
        uint32_t normal = (magnitude - (112u << 23) + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
        uint32_t tiny = as_bits(as_float(magnitude) + 0.5f) - as_bits(0.5f); /* the addition rounds the subnormal */
        uint32_t half = magnitude < 113u << 23 ? tiny : normal;
        half = magnitude >= 0x477ff000u ? 0x7c00u : half; /* 65520 and more round to infinity */
        half = magnitude > 0x7f800000u ? 0x7e00u : half;
        to[i] = (uint16_t)(half | sign >> 16);
    }
}

#endif

static void widen_bf16(float *restrict to, const uint16_t *restrict from, size_t n) {
    for (size_t i = 0; i < n; ++i) to[i] = as_float((uint32_t)from[i] << 16);
}

/* Copy a tile to the parameter, past the caches if it is aligned: full cache lines are then not read before they are
   written, and the copy to the device finds the parameter in memory. 3 % faster than plain stores. `store_fence` makes
   the stores visible to other threads. */
static void put(uint16_t *to, const uint16_t *tile, size_t n) {
#if defined(__SSE2__)
    if (n == TILE && (uintptr_t)to % 64 == 0) {
        for (size_t i = 0; i < TILE; i += 8)
            _mm_stream_si128((__m128i *)(to + i), _mm_load_si128((const __m128i *)(tile + i)));
        return;
    }
#endif
    memcpy(to, tile, n * sizeof *to);
}

INLINE void store_fence(void) {
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* -- the update ---------------------------------------------------------------------------------------------------- */

/* The weight after a step, as in torch's fused AdamW; `root` is the root of the second moment. Decay and step are added
   before they change the weight, so the
   weight is rounded once per step: weight * rounded(1 - lr * weight_decay) drifts by up to 3e-8 of itself per step. */
INLINE float stepped(float weight, float first, float root, Coefficients k) {
    float denominator = multiply_add(root, k.inverse_correction2, k.eps);
    float value = weight - multiply_add(k.step_size, first / denominator, weight * k.decay);
    return value == value ? value : as_float(0x7fc00000u); /* one NaN, with an empty low half */
}

/* How a weight is stored: in `wide`; in `wide` and rounded in `high`; or split into `high` and `low`. The high half is
   rounded, ties away from zero, so the high half is the nearest bf16 and the low half is signed. */
typedef enum { WIDE, ROUNDED, SPLIT } Form;

/* With `keeps_root`, `exp_avg_sq` receives the root of the second moment instead of the moment; not with `has_max`. */
INLINE void update(void *weights, uint16_t *restrict high, const float *restrict slope, Moments moments, size_t n,
                   Coefficients k, const Form form, const int has_max, const int keeps_root) {
    float *restrict wide = weights, *restrict exp_avg = moments.exp_avg, *restrict exp_avg_sq = moments.exp_avg_sq;
    float *restrict max_exp_avg_sq = moments.max_exp_avg_sq;
    int16_t *restrict low = weights;
    for (size_t i = 0; i < n; ++i) {
        float grad = slope[i] * k.grad_factor;
        float first = multiply_add(grad, k.one_minus_beta1, exp_avg[i] * k.beta1);
        float second = multiply_add(grad * grad, k.one_minus_beta2, exp_avg_sq[i] * k.beta2);
        exp_avg[i] = first;
        if (!keeps_root) exp_avg_sq[i] = second;
        if (has_max) {
            float most = max_exp_avg_sq[i];
            second = most > second || most != most ? most : second; /* a NaN stays, as in torch.maximum */
            max_exp_avg_sq[i] = second;
        }
        float root = __builtin_sqrtf(second);
        if (keeps_root) exp_avg_sq[i] = root;
        float weight = form == SPLIT ? as_float(((uint32_t)high[i] << 16) + (uint32_t)(int32_t)low[i]) : wide[i];
        weight = stepped(weight, first, root, k);
        uint32_t bits = as_bits(weight);
        if (form == SPLIT) low[i] = (int16_t)(uint16_t)bits, high[i] = (uint16_t)((bits + 0x8000u) >> 16);
        else wide[i] = weight;
        if (form == ROUNDED) high[i] = (uint16_t)((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16); /* ties to even */
    }
}

static void updated(void *weights, uint16_t *high, const float *slope, Moments all, size_t start, size_t n,
                    const Coefficients *k, Form form, int keeps_root) {
    const int has_max = all.max_exp_avg_sq != NULL;
    const Moments here = {all.exp_avg + start, all.exp_avg_sq + start, has_max ? all.max_exp_avg_sq + start : NULL};
    if (form == WIDE && has_max) update(weights, high, slope, here, n, *k, WIDE, 1, 0);
    if (form == WIDE && !has_max && !keeps_root) update(weights, high, slope, here, n, *k, WIDE, 0, 0);
    if (form == WIDE && keeps_root) update(weights, high, slope, here, n, *k, WIDE, 0, 1);
    if (form == ROUNDED && has_max) update(weights, high, slope, here, n, *k, ROUNDED, 1, 0);
    if (form == ROUNDED && !has_max && !keeps_root) update(weights, high, slope, here, n, *k, ROUNDED, 0, 0);
    if (form == ROUNDED && keeps_root) update(weights, high, slope, here, n, *k, ROUNDED, 0, 1);
    if (form == SPLIT && has_max) update(weights, high, slope, here, n, *k, SPLIT, 1, 0);
    if (form == SPLIT && !has_max && !keeps_root) update(weights, high, slope, here, n, *k, SPLIT, 0, 0);
    if (form == SPLIT && keeps_root) update(weights, high, slope, here, n, *k, SPLIT, 0, 1);
}

/* Return the gradient from `start` on in fp32: a pointer to `tile`, or to the gradient itself. */
static const float *widened(float *tile, Gradient grad, size_t start, size_t n) {
    if (grad.kind == FP32) return (const float *)grad.values + start;
    if (grad.kind == BF16) widen_bf16(tile, (const uint16_t *)grad.values + start, n);
    if (grad.kind == FP16) widen_fp16(tile, (const uint16_t *)grad.values + start, n);
    return tile;
}

/* -- what Python calls --------------------------------------------------------------------------------------------- */

/* `param` may be NULL. */
void mixed_adamw(float *master, Moments moments, Gradient grad, uint16_t *param, int param_kind, size_t n,
                 const Coefficients *k) {
    const Form form = param && param_kind == BF16 ? ROUNDED : WIDE;
    float tile[TILE];
    uint16_t high[TILE] __attribute__((aligned(64)));
    for (size_t start = 0; start < n; start += TILE) {
        const size_t rest = n - start < TILE ? n - start : TILE;
        const float *slope = widened(tile, grad, start, rest);
        updated(master + start, high, slope, moments, start, rest, k, form, 0);
        if (form == ROUNDED) put(param + start, high, rest);
        else if (param) narrow_fp16(param + start, master + start, rest);
    }
    store_fence();
}

/* `high` is the parameter, bf16. */
void split_adamw(int16_t *low, Moments moments, Gradient grad, uint16_t *high, size_t n, const Coefficients *k) {
    float tile[TILE];
    for (size_t start = 0; start < n; start += TILE) {
        const size_t rest = n - start < TILE ? n - start : TILE;
        const float *slope = widened(tile, grad, start, rest);
        updated(low + start, high + start, slope, moments, start, rest, k, SPLIT, 0);
    }
}

typedef float Lanes __attribute__((vector_size(64)));
enum { WIDTH = 16, PARTS = 4 };

/* The sum of the squares of at most TILE values. Lanes are summed in an order that no compiler changes. */
static double squares(const float *values, size_t n) {
    Lanes sums[PARTS] = {{0}};
    size_t i = 0;
    for (; i + PARTS * WIDTH <= n; i += PARTS * WIDTH)
        for (size_t part = 0; part < PARTS; ++part) {
            Lanes here;
            memcpy(&here, values + i + part * WIDTH, sizeof here);
            sums[part] += here * here;
        }
    const Lanes lanes = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    double sum = 0.0;
    for (size_t lane = 0; lane < 4; ++lane)
        sum += ((double)lanes[lane] + lanes[lane + 4]) + ((double)lanes[lane + 8] + lanes[lane + 12]);
    for (; i < n; ++i) sum += (double)values[i] * values[i];
    if (sum > 0x1p-60 && sum < 0x1p120) return sum;
    /* Zeros, or squares outside the range of fp32. In double, no square of a finite value overflows or vanishes. */
    sum = 0.0;
    for (i = 0; i < n; ++i) sum += (double)values[i] * values[i];
    return sum;
}

/* Write the sum of squares of each `block` values, a multiple of TILE, to `sums`; finite if and only if they are. */
void sums_of_squares(double *sums, Gradient grad, size_t n, size_t block) {
    float tile[TILE];
    for (size_t start = 0; start < n; start += TILE) {
        const size_t rest = n - start < TILE ? n - start : TILE;
        if (start % block == 0) sums[start / block] = 0.0;
        sums[start / block] += squares(widened(tile, grad, start, rest), rest);
    }
}
