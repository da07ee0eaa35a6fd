// Matrix tiles (AMX): eight registers of 16 rows of 64 bytes.  One instruction adds the products of 16 rows of 32 numbers
// with 16 pairs of rows, [32 / 2, 16, 2], to 16 x 16 sums in float32: those of even and of odd inputs apart, each from
// first to last, and then both.  A row's sums do not depend on how many rows there are.
#pragma once
#include "common.h"

#if defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

// Linux grants a process its tiles when asked, once; a sandbox may not let it ask.
static int has_tiles(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    static int known = -1;
    if (known < 0) known = !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
    return known;
}

// Sums 0 and 1 of the `rows` in register 4, sums 2 and 3 of the `more` (0: none) in register 5; 6 and 7 are whole.  What
// is set is the thread's, until `_tile_release`.
INLINE void configure_tiles(int rows, int more) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    int of[8] = {rows, rows, more ? more : 1, more ? more : 1, rows, more ? more : 1, 16, 16};
    for (int i = 0; i < 8; i++) {
        config.bytes[i] = 64;
        config.rows[i] = of[i];
    }
    _tile_loadconfig(&config);
}
#endif
