// Attention of one token, for one key-value head. Under the rule of isa/kernels.h: internal linkage.
#pragma once

#include "common/activation.h"
#include "common/unroll.h"
#include "table.h"

namespace jaxgemv::cpu {
namespace {

// Queries that share one read of keys and values, and vectors of a value row whose sums are kept in registers.
constexpr int kQueries = 4, kValueVectors = kLanes == 16 ? 4 : 2;
// Bytes by which keys are prefetched ahead: the hardware prefetcher fetches few at the beginning of a page.
constexpr Index kKeysAhead = 2048;

template <Dtype kDtype>
struct OneHead {
  static constexpr Index kSize = size_of(kDtype);

  const Attention& a;
  const char *k, *v;   // keys and values of this head
  float *q, *weights;  // (queries, width in whole vectors), (queries, positions in whole vectors)
  Index width, count;  // width in whole vectors; positions seen

  // Writes the scores of kCount queries to `weights`, and the largest of each to `most`.
  template <int kCount>
  void score(Index query, float (&most)[kQueries]) const {
    const Index row = a.width * kSize, stride = padded(count);
    for (int i = 0; i < kCount; ++i) most[i] = -__builtin_inff();
    for (Index s = 0; s < count; ++s) {
      const Index position = a.first + s;
      // Prefetches values too, which mix() reads next.
      for (Index line = 0; line < row; line += 64) {
        __builtin_prefetch(k + position * row + kKeysAhead + line);
        __builtin_prefetch(v + position * row + line, 0, 2);
      }
      Floats sum[kCount] = {};
      for (Index i = 0; i < a.width; i += kLanes) {
        const Floats key = read_vector<kDtype>(k, position * a.width + i, a.width - i);
        JAXGEMV_UNROLL
        for (int j = 0; j < kCount; ++j) sum[j] += key * load_floats(q + (query + j) * width + i);
      }
      JAXGEMV_UNROLL
      for (int j = 0; j < kCount; ++j) {
        const float score = sum_of(sum[j]);
        weights[(query + j) * stride + s] = score;
        most[j] = score > most[j] ? score : most[j];
      }
    }
  }

  // Turns the scores of a query into exp(score - most). Returns 1 / their sum.
  float soften(Index query, float most) const {
    float* scores = weights + query * padded(count);
    for (Index s = count; s < padded(count); ++s) scores[s] = -__builtin_inff();
    Floats sum = {};
    for (Index s = 0; s < count; s += kLanes) {
      const Floats weight = exp_of(load_floats(scores + s) - most);
      store_floats(scores + s, weight);
      sum += weight;
    }
    return 1 / sum_of(sum);
  }

  template <int kCount>
  void mix(Index query, const float (&share)[kQueries], Index first_head) const {
    const Index stride = padded(count);
    for (Index begin = 0; begin < a.width; begin += kValueVectors * kLanes) {
      Floats sum[kCount][kValueVectors] = {};
      for (Index s = 0; s < count; ++s) {
        Floats value[kValueVectors];
        JAXGEMV_UNROLL
        for (int i = 0; i < kValueVectors; ++i) {
          const Index at = begin + i * kLanes;
          value[i] = at < a.width
                         ? read_vector<kDtype>(v, (a.first + s) * a.width + at, a.width - at)
                         : Floats{};
        }
        JAXGEMV_UNROLL
        for (int j = 0; j < kCount; ++j) {
          const Floats weight = broadcast(weights[(query + j) * stride + s]);
          JAXGEMV_UNROLL
          for (int i = 0; i < kValueVectors; ++i) sum[j][i] += weight * value[i];
        }
      }
      JAXGEMV_UNROLL
      for (int j = 0; j < kCount; ++j) {
        float mean[kValueVectors * kLanes];
        JAXGEMV_UNROLL
        for (int i = 0; i < kValueVectors; ++i)
          store_floats(mean + i * kLanes, sum[j][i] * share[j]);
        write_floats(kDtype, a.out, (first_head + query + j) * a.width + begin,
                     min_of(kValueVectors * kLanes, a.width - begin), mean);
      }
    }
  }

  template <int kCount>
  void run(Index query, Index first_head) const {
    float most[kQueries], share[kQueries];
    score<kCount>(query, most);
    for (int j = 0; j < kCount; ++j) share[j] = soften(query + j, most[j]);
    mix<kCount>(query, share, first_head);
  }
};

// Floats of scratch that attend() needs.
inline Index attention_scratch(const Attention& a) {
  return a.heads / a.kv_heads * (padded(a.width) + padded(a.end - a.first));
}

// Attention for all queries that share a key-value head.
inline void attend(const Attention& a, Index kv_head, float* scratch) {
  const Index queries = a.heads / a.kv_heads, first_head = kv_head * queries;
  const Index width = padded(a.width), before = kv_head * a.size * a.width * size_of(a.dtype);
  if (a.first >= a.end) {
    for (Index i = first_head * a.width; i < (first_head + queries) * a.width; ++i)
      write_float(a.dtype, a.out, i, __builtin_nanf(""));
    return;
  }
  for (Index query = 0; query < queries; ++query)
    for (Index i = 0; i < width; i += kLanes)
      store_floats(
          scratch + query * width + i,
          a.scale * (i < a.width ? read_vector(a.dtype, a.q, (first_head + query) * a.width + i,
                                               a.width - i)
                                 : Floats{}));
  with_dtype(a.dtype, [&]<Dtype kDtype>() {
    if constexpr (is_wide(kDtype)) {
      const OneHead<kDtype> head = {a,
                                    static_cast<const char*>(a.k) + before,
                                    static_cast<const char*>(a.v) + before,
                                    scratch,
                                    scratch + queries * width,
                                    width,
                                    a.end - a.first};
      Index query = 0;
      for (; query + kQueries <= queries; query += kQueries)
        head.template run<kQueries>(query, first_head);
      switch (queries - query) {
        case 3: return head.template run<3>(query, first_head);
        case 2: return head.template run<2>(query, first_head);
        case 1: return head.template run<1>(query, first_head);
      }
    }
  });
}

}  // namespace
}  // namespace jaxgemv::cpu
