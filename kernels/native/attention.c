// Attention of new tokens over a slot cache.  A token sees the known places of its slot, then its own path: the draft
// tokens that lead to it or, in a prompt, the tokens before it in its block.
//
//     out = sum_c p_c v_c,   p_c = e^(s_c - max s) / sum,   s_c = q . k_c / sqrt(d)
//
// e^(s - max s) is rounded to bfloat16 before it is multiplied with the values, as in FlashAttention; sums are float32.
// A block has 16 places.  Tokens with the same slot and the same known part form a group, which shares the whole blocks of
// that part.  The rest of the known part and the path follow token by token, as if they were contiguous.  So sums run in
// the order of the sequence, wherever a token is in the cache and whatever else is in the pass: a token's result is bitwise
// the same in every batch and every draft tree.
//
// With matrix tiles, blocks of values have 32 places, and scores and weighted values of 16 rows are products of tiles.
// Tokens whose paths form one chain are computed together to its end: a place that a token does not see has weight 0.
#include "attention.h"

// tokens by slot, otherwise in their order
static void by_slot(const Layout *layout, int64_t *order) {
    int64_t slots = 0;
    for (int64_t t = 0; t < layout->tokens; t++)
        if (layout->slot[t] >= slots) slots = layout->slot[t] + 1;
    int64_t *next = calloc(slots + 1, sizeof(int64_t));
    for (int64_t t = 0; t < layout->tokens; t++) next[layout->slot[t] + 1]++;
    for (int64_t s = 0; s < slots; s++) next[s + 1] += next[s];
    for (int64_t t = 0; t < layout->tokens; t++) order[next[layout->slot[t]]++] = t;
    free(next);
}

void attention(const bf16 *q, int64_t row_stride, const Layout *layout, const Cache *cache, int64_t heads,
               int64_t kv_heads, int64_t dim, bf16 *out) {
    int64_t groups = 0, *order = malloc(sizeof(int64_t) * (2 * layout->tokens + 1)), *start = order + layout->tokens;
    by_slot(layout, order);
    for (int64_t i = 0; i < layout->tokens; i++) {
        int64_t t = order[i], before = i ? order[i - 1] : -1;
        if (!i || layout->slot[t] != layout->slot[before] || layout->known[t] != layout->known[before]) start[groups++] = i;
    }
    start[groups] = layout->tokens;
#define EACH_GROUP(attend) \
    for (int64_t work = 0; work < groups * kv_heads; work++) { \
        int64_t first = start[work / kv_heads], count = start[work / kv_heads + 1] - first; \
        attend(&(Group){q, row_stride, layout, cache, order + first, count, work % kv_heads, heads / kv_heads, dim, out, \
                        heads * dim}); \
    }
#ifdef HAS_TILES
    if (has_tiles()) {
#pragma omp parallel
        {
            configure_tiles(TILE_ROWS, TILE_ROWS);
#pragma omp for
            EACH_GROUP(attend_with_tiles)
            _tile_release();
        }
        free(order);
        return;
    }
#endif
#pragma omp parallel for
    EACH_GROUP(attend_with_vectors)
    free(order);
}
