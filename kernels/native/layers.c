// Consecutive decoder layers over T tokens (`tlt_core.model.decoder.Layer`) in one call.
//
//     x += W_o attend(rope(W_qkv norm(x)));   x += W_down (silu(gate) * up),   gate, up = W_gate_up norm(x)
//
// Norms, rotation and activation are computed in float32 and rounded to bfloat16 once; each token by itself.
#include <math.h>

#include "common.h"
#include "layers.h"

typedef struct {
    Linear qkv, o, gate_up, down;
    const bf16 *input_norm, *post_norm, *q_norm, *k_norm;  // q_norm and k_norm: NULL without
} Layer;

typedef struct {
    int64_t hidden, heads, kv_heads, dim, intermediate;
    float eps;
} Shape;

static __thread void *kept;
static __thread size_t kept_size;

// queries are rotated in place, keys and values go to the cache
static void place_heads(const Shape *s, const Layer *l, const Layout *layout, const Cache *cache, const bf16 *cos,
                        const bf16 *sin, int64_t t, bf16 *qkv) {
    bf16 *k = qkv + s->heads * s->dim, *v = k + s->kv_heads * s->dim;
    int64_t at = layout->slot[t] * cache->slot_stride + layout->place[t] * s->dim;
    for (int64_t h = 0; h < s->heads; h++) {
        bf16 *q = qkv + h * s->dim;
        if (l->q_norm) rms_norm(q, l->q_norm, s->dim, s->eps, q);
        rotate(q, cos + t * s->dim, sin + t * s->dim, sin + t * s->dim + s->dim / 2, s->dim, q);
    }
    for (int64_t h = 0; h < s->kv_heads; h++, at += cache->head_stride) {
        if (l->k_norm) rms_norm(k + h * s->dim, l->k_norm, s->dim, s->eps, k + h * s->dim);
        rotate(k + h * s->dim, cos + t * s->dim, sin + t * s->dim, sin + t * s->dim + s->dim / 2, s->dim, cache->keys + at);
        memcpy(cache->values + at, v + h * s->dim, sizeof(bf16) * s->dim);
    }
}

// queries, keys and values of `normed` [T, in] -> attention -> r += W_o ...; r += W_down (silu(gate) * up)
static void attend_and_mix(const Shape *s, const Layer *l, const Cache *cache, const Layout *layout, const bf16 *cos,
                           const bf16 *sin, bf16 *normed, bf16 *work, bf16 *r) {
    int64_t tokens = layout->tokens, qkv_size = (s->heads + 2 * s->kv_heads) * s->dim;
    bf16 *qkv = work, *attended = work + tokens * qkv_size;
    linear(normed, tokens, &l->qkv, qkv, 0);
    for (int64_t t = 0; t < tokens; t++) place_heads(s, l, layout, cache, cos, sin, t, qkv + t * qkv_size);
    attention(qkv, qkv_size, layout, cache, s->heads, s->kv_heads, s->dim, attended);
    linear(attended, tokens, &l->o, r, 1);
    bf16 *gate_up = work, *active = work + tokens * 2 * s->intermediate;
    for (int64_t t = 0; t < tokens; t++)
        rms_norm(r + t * s->hidden, l->post_norm, s->hidden, s->eps, normed + t * s->hidden);
    linear(normed, tokens, &l->gate_up, gate_up, 0);
    for (int64_t t = 0; t < tokens; t++)
        swiglu(gate_up + t * 2 * s->intermediate, s->intermediate, active + t * s->intermediate);
    linear(active, tokens, &l->down, r, 1);
}

// memory for a layer's input, `width` numbers a token, and behind it for its intermediate results
static bf16 *make_room(const Shape *s, int64_t tokens, int64_t width) {
    int64_t qkv = (s->heads + 2 * s->kv_heads) * s->dim + s->heads * s->dim, mlp = 3 * s->intermediate;
    return scratch(&kept, &kept_size, sizeof(bf16) * tokens * (width + (qkv > mlp ? qkv : mlp)));
}

// x [T, D] in place; cos, signed_sin [T, d]; caches: one a layer
EXPORT void tlt_layers(const Shape *s, const Layer *layers, const Cache *caches, int64_t count, const Layout *layout,
                       const bf16 *cos, const bf16 *signed_sin, bf16 *x) {
    bf16 *normed = make_room(s, layout->tokens, s->hidden);
    for (int64_t i = 0; i < count; i++) {
        for (int64_t t = 0; t < layout->tokens; t++)
            rms_norm(x + t * s->hidden, layers[i].input_norm, s->hidden, s->eps, normed + t * s->hidden);
        attend_and_mix(s, layers + i, caches + i, layout, cos, signed_sin, normed, normed + layout->tokens * s->hidden, x);
    }
}

// EAGLE-3's layer, `eagle3_model.py`: attention reads the norms of embedding and hidden state side by side; the hidden
// state is the residual stream.  embeds, hidden, y: [T, D]
EXPORT void tlt_eagle3_layer(const Shape *s, const Layer *layer, const bf16 *hidden_norm, const Cache *cache,
                             const Layout *layout, const bf16 *cos, const bf16 *signed_sin, const bf16 *embeds,
                             const bf16 *hidden, bf16 *y) {
    bf16 *both = make_room(s, layout->tokens, 2 * s->hidden);
    for (int64_t t = 0; t < layout->tokens; t++) {
        bf16 *to = both + t * 2 * s->hidden;
        rms_norm(embeds + t * s->hidden, layer->input_norm, s->hidden, s->eps, to);
        rms_norm(hidden + t * s->hidden, hidden_norm, s->hidden, s->eps, to + s->hidden);
    }
    memcpy(y, hidden, sizeof(bf16) * layout->tokens * s->hidden);
    attend_and_mix(s, layer, cache, layout, cos, signed_sin, both, both + layout->tokens * 2 * s->hidden, y);
}

EXPORT void tlt_rms_norm(const bf16 *x, const bf16 *weight, int64_t rows, int64_t size, float eps, bf16 *y) {
    for (int64_t t = 0; t < rows; t++) rms_norm(x + t * size, weight, size, eps, y + t * size);
}

// Inputs for drafting a chain; see `eagle3.py`.
typedef struct {
    const bf16 *embeddings;   // [V, D], the target's
    const bf16 *norm;         // before the head
    const int32_t *ids;       // [J] tokens of the head's outputs
    const bf16 *rope;         // [positions, 2, d]: cos, signed sin
    const int64_t *ends;      // [B] position of the first drafted token
    const int32_t *keys;      // [B, levels, 2] of the noise
    int64_t rows, levels, positions;
    float temperature, error_scale;
    float min_token_prob, min_level_sum;  // drafting ends at a level that promises less, see `MinDraftProbs`
} Chain;

// A chain of `levels` tokens a row.  y [B, D]: of each row's last position; columns, values [B, levels]: of the head's
// outputs, and log of the chance that verification gets there.  Draft tokens lie at places -(levels - 1) .. -1.
// done: levels that were drafted, at least 1.
EXPORT void tlt_eagle3_chain(const Shape *s, const Layer *layer, const bf16 *hidden_norm, const Linear *head,
                             const Cache *cache, const Chain *c, bf16 *y, int64_t *columns, float *values,
                             int64_t *done) {
    int64_t rows = c->rows, width = c->levels, size = s->hidden, half = rows * s->dim;
    static __thread void *own;
    static __thread size_t own_size;
    size_t bytes = sizeof(int64_t) * rows * (width + 5) + sizeof(float) * rows + sizeof(bf16) * rows * (3 * size + head->out + 2 * s->dim);
    int64_t *slot = scratch(&own, &own_size, bytes), *place = slot + rows, *length = place + rows, *column = length + rows;
    int64_t *path = column + rows + rows;
    float *value = (float *)(path + rows * width);
    bf16 *normed = (bf16 *)(value + rows), *embeds = normed + rows * size, *next = embeds + rows * size;
    bf16 *cos = next + rows * size, *sin = cos + half, *logits = sin + half;
    for (*done = 0; *done < width;) {
        int64_t level = (*done)++;
        float promised = 0.0f;
        for (int64_t b = 0; b < rows; b++) rms_norm(y + b * size, c->norm, size, s->eps, normed + b * size);
        linear(normed, rows, head, logits, 0);
        for (int64_t b = 0; b < rows; b++) {
            tlt_draft_children(logits + b * head->out, c->keys + 2 * (b * width + level), c->ids, 1, head->out,
                               c->temperature, c->error_scale, 1, column + b, value + b);
            columns[b * width + level] = column[b];
            float sum = value[b] + (level ? values[b * width + level - 1] : 0.0f);
            values[b * width + level] = sum;
            if (c->min_token_prob == 0.0f || sum >= logf(c->min_token_prob)) promised += expf(sum);
        }
        if (*done == width || (c->min_token_prob != 0.0f && promised <= c->min_level_sum)) return;
        for (int64_t b = 0; b < rows; b++) {
            int64_t position = c->ends[b] + level < c->positions ? c->ends[b] + level : c->positions - 1;
            slot[b] = b;
            place[b] = level - (width - 1);
            length[b] = level + 1;
            for (int64_t i = 0; i < width; i++) path[b * width + i] = (i < level ? i : level) - (width - 1);
            memcpy(embeds + b * size, c->embeddings + c->ids[column[b]] * size, sizeof(bf16) * size);
            memcpy(cos + b * s->dim, c->rope + 2 * position * s->dim, sizeof(bf16) * s->dim);
            memcpy(sin + b * s->dim, c->rope + (2 * position + 1) * s->dim, sizeof(bf16) * s->dim);
        }
        Layout layout = {rows, slot, place, c->ends, path, length, width};
        tlt_eagle3_layer(s, layer, hidden_norm, cache, &layout, cos, sin, embeds, y, next);
        memcpy(y, next, sizeof(bf16) * rows * size);
    }
}
