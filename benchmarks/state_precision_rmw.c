/* Loops that read and write the bytes of a step with a split master and moments of 16 or 8 bits, and compute next to
   nothing. `zero` is 0, unknown to the compiler, so that the arrays keep their values. */

#include <math.h>
#include <stddef.h>
#include <stdint.h>

/* 18 B: read 2, read and write 4 x 2. */
void rmw_bfloat16(uint16_t *restrict low, uint16_t *restrict b, uint16_t *restrict c, const uint16_t *restrict g,
                  uint16_t *restrict p, size_t n, uint16_t zero) {
    for (size_t i = 0; i < n; ++i) {
        uint16_t same = (uint16_t)(g[i] & zero);
        low[i] = (uint16_t)(low[i] ^ same), p[i] = (uint16_t)(p[i] ^ same);
        b[i] = (uint16_t)(b[i] ^ zero), c[i] = (uint16_t)(c[i] ^ zero);
    }
}

/* 14 B: read 2, read and write 2 x 2 and 2 x 1. A step also reads and writes 1/16 B of scales twice. */
void rmw_8bit(uint16_t *restrict low, uint8_t *restrict b, uint8_t *restrict c, const uint16_t *restrict g,
              uint16_t *restrict p, size_t n, uint16_t zero) {
    for (size_t i = 0; i < n; ++i) {
        uint16_t same = (uint16_t)(g[i] & zero);
        low[i] = (uint16_t)(low[i] ^ same), p[i] = (uint16_t)(p[i] ^ same);
    }
    for (size_t i = 0; i < n; ++i) b[i] = (uint8_t)(b[i] ^ zero), c[i] = (uint8_t)(c[i] ^ zero);
}

/* The square root and the division of a step, which no form of its moments can do without, and one addition. */
void root_and_quotient(float *restrict to, const float *restrict first, const float *restrict second, size_t n) {
    for (size_t i = 0; i < n; ++i) to[i] = first[i] / (sqrtf(second[i]) + 1e-8f);
}
