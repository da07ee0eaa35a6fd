// Bookkeeping of a draft tree: where its tokens are, which of them are accepted, and the move to their positions.
// Specifications: `tree_layout.py`, `spec_verify.py`, `kv_commit.py`.
#include "common.h"

// B newest tokens, then N draft tokens in row order; path [B + N, width], behind its length: the token's own place
EXPORT void tlt_tree_layout(const int64_t *positions, int64_t rows, const int64_t *parent, const int64_t *row,
                            const int64_t *depth, int64_t drafts, int64_t width, int64_t *slot, int64_t *position,
                            int64_t *place, int64_t *known, int64_t *path, int64_t *length) {
    for (int64_t b = 0; b < rows; b++) {
        slot[b] = b;
        position[b] = place[b] = positions[b];
        known[b] = positions[b] + 1;
        length[b] = 0;
        for (int64_t i = 0; i < width; i++) path[b * width + i] = place[b];
    }
    int64_t before = 0;  // drafts of the same row so far
    for (int64_t n = 0; n < drafts; n++) {
        int64_t b = row[n], t = rows + n;
        before = n && row[n - 1] == b ? before + 1 : 0;
        slot[t] = b;
        position[t] = positions[b] + depth[n];
        place[t] = positions[b] + before + 1;
        known[t] = positions[b] + 1;
        length[t] = depth[n];
        for (int64_t i = depth[n]; i < width; i++) path[t * width + i] = place[t];
        for (int64_t up = n, at = depth[n]; up >= 0 && at > 0; up = parent[up]) path[t * width + --at] = place[rows + up];
    }
}

// nodes, [B, depth + 1];  a row's newest token is node b, draft n is node B + n
EXPORT void tlt_accepted_path(const int64_t *choice, const int64_t *token, const int64_t *parent, const int64_t *row,
                              int64_t drafts, int64_t rows, int64_t depth, int64_t *nodes, int64_t *counts) {
    int64_t n = 0;
    for (int64_t b = 0; b < rows; b++) {
        int64_t current = b, count = 1, first = n;
        while (n < drafts && row[n] == b) n++;
        nodes[b * (depth + 1)] = b;
        for (int64_t level = 1; level <= depth; level++) {
            int64_t child = -1;
            for (int64_t m = first; m < n; m++)
                if ((parent[m] < 0 ? b : rows + parent[m]) == current && token[m] == choice[current]) child = rows + m;
            if (child >= 0 && count == level) {
                current = child;
                count++;
            }
            nodes[b * (depth + 1) + level] = current;
        }
        counts[b] = count;
    }
}

typedef struct {
    int64_t layers, kv_heads, token_bytes, layer_stride, slot_stride, head_stride;  // all but the first two in bytes
} CacheShape;

// sources, targets, moved: [B, steps]; row b is slot b
EXPORT void tlt_kv_commit(char *keys, char *values, const CacheShape *s, const int64_t *sources, const int64_t *targets,
                          const uint8_t *moved, int64_t rows, int64_t steps) {
    for (int64_t i = 0; i < rows * steps; i++)
        for (int64_t part = 0; moved[i] && part < s->layers * s->kv_heads; part++) {
            int64_t base = part / s->kv_heads * s->layer_stride + i / steps * s->slot_stride + part % s->kv_heads * s->head_stride;
            int64_t from = base + sources[i] * s->token_bytes, to = base + targets[i] * s->token_bytes;
            memcpy(keys + to, keys + from, s->token_bytes);
            memcpy(values + to, values + from, s->token_bytes);
        }
}
