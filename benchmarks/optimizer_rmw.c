/* The limit that host passes are held against: loops that read and write the same bytes and compute next to nothing.
   `one` is 1 and `zero` is 0, unknown to the compiler, so that the arrays keep their values. */

#include <stddef.h>
#include <stdint.h>

/* 28 B: read 2, read and write 3 x 4, write 2. */
void rmw_mixed(float *restrict a, float *restrict b, float *restrict c, const uint16_t *restrict g,
               uint16_t *restrict p, size_t n, float one, uint16_t zero) {
    for (size_t i = 0; i < n; ++i) {
        a[i] *= one;
        b[i] *= one;
        c[i] *= one;
        p[i] = (uint16_t)(g[i] + zero);
    }
}

/* 26 B: read 2, read and write 2 x 4 and 2 x 2. */
void rmw_split(uint16_t *restrict low, float *restrict b, float *restrict c, const uint16_t *restrict g,
               uint16_t *restrict p, size_t n, float one, uint16_t zero) {
    for (size_t i = 0; i < n; ++i) {
        uint16_t same = (uint16_t)(g[i] & zero);
        low[i] = (uint16_t)(low[i] ^ same);
        b[i] *= one;
        c[i] *= one;
        p[i] = (uint16_t)(p[i] ^ same);
    }
}
