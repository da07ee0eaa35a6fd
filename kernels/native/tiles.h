// Matrix tiles (AMX): eight registers of 16 rows of 64 bytes.  One instruction multiplies 16 rows of 32 numbers with
// [32 / 2, 16, 2] and adds the products to 16 x 16 sums in float32: first even and odd inputs apart, each from first to
// last, then both.  A row's sums do not depend on the number of rows.
#pragma once
#include "common.h"

// GCC 12 leaves __AMX_BF16__ defined under -mno-amx-tile.
#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__linux__)
#define HAS_TILES
#include <sys/syscall.h>
#include <unistd.h>

enum { TILE_ROWS = 16 };

// A process must ask Linux for its tiles once; a sandbox may forbid it.
INLINE int has_tiles(void) {
    enum { REQUEST = 0x1023, TILE_DATA = 18 };
    static int known = -1;
    if (known < 0) known = !syscall(SYS_arch_prctl, REQUEST, TILE_DATA);
    return known;
}

// Registers 0 and 1 are sums for the `rows` in register 4, registers 2 and 3 for the `more` (0: none) in register 5;
// registers 6 and 7 have all rows.  The setting is the thread's, until `_tile_release`.
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
