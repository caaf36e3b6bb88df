// int8 x @ w.T for one or two rows of the activation and codes with a history, which are decoded in registers. Levels are
// used in the order in which they are decoded: plane by plane, 64 columns at a time. So the activation is brought into
// this order. Other instruction sets, and more rows, read levels that decode/unpack_states.h wrote to a cache.
#define EQQUANT_TARGET_GFNI
#include <vector>

#include "decode/unpack_states.h"
#include "microkernels/vnni/int8_few_rows.h"
#include "microkernels/vnni/int8_states.h"

EQQUANT_BEGIN
namespace few_rows {
namespace {

struct Geometry {
  // The columns of a block, and the groups of 64 columns.
  int64_t planes, columns, pieces;

  explicit Geometry(const Product& p)
      : planes(p.stored_bits == 4 ? 2 : 4), columns(p.run / planes), pieces((columns + chunk - 1) / chunk) {}
  int64_t chunks() const { return pieces * planes; }
};

// The product with columns in the order of decoding, padded to whole chunks.
Product in_order_of_decoding(const Product& p) {
  Product out = p;
  out.run = chunk;
  out.packed = p.blocks * Geometry(p).chunks() * chunk;
  return out;
}

// The high bits of codes of 3 bits: `back` columns before each of 64 columns.
EQQUANT_INLINE __m512i high_bits(const uint8_t* high, int64_t columns, int back) {
  const int64_t half = columns / 2;
  const __mmask64 first_half = first_bytes(half + back) & ~first_bytes(back), all = first_bytes(columns);
  const __m512i second = _mm512_maskz_loadu_epi8(all & ~first_bytes(half + back), high - half - back);
  return _mm512_or_si512(_mm512_maskz_loadu_epi8(first_half & all, high - back), ByteVector::halve(second));
}

template <int bits, int rows, int count, int parts>
void run_tile(const Product& p, const Product& order, Operands<UnpackedBytes>& from, const States<bits>& states,
              int64_t row, const char* x, const float* units, int64_t stride) {
  constexpr ChunkOfX shape = {count, parts, 1};
  const Geometry of(p);
  const int64_t of_block = p.run * bits / 8;
  BlockedRows<rows, UnpackedBytes> weights(order, 1, from.blocks, from.stored, from.scales, row);
  const uint8_t* codes = p.stored(row);
  const int64_t far = p.far_from(codes), of_row = p.stored_bytes();
  __m512 scales[rows][count], totals[rows][count];
  unrolled<rows>([&](auto r) { unrolled<count>([&](auto i) { totals[r][i] = _mm512_setzero_ps(); }); });
  for (int64_t b = 0; b < p.blocks; b++, codes += of_block) {
    if (b % ChunkScales::groups_of_span == 0) {
      if (b) weights.read_scales();
      scale_units(weights, units, stride, scales);
    }
    __m512i sums[rows][shape.sums()];
    unrolled<shape.sums()>([&](auto i) {
      const __m512i correction = _mm512_loadu_si512(x + shape.correction(i) * chunk);
      unrolled<rows>([&](auto r) { sums[r][i] = correction; });
    });
    for (int64_t j = 0; j < of.columns; j += chunk) {
      typename States<bits>::Window windows[rows];
      unrolled<rows>([&](auto r) {
        const uint8_t* const at = codes + r * of_row;
        States<bits>::load(at, j, std::min(chunk, of.columns - j), windows[r], [](__m512i some) { return some; });
        if constexpr (bits == 3)
          unrolled<2>([&](auto back) {
            windows[r][States<bits>::columns_of_window + back] = high_bits(at + of.columns, of.columns, back);
          });
        prefetch(at + j, far), prefetch_near(at + j);
      });
      unrolled<States<bits>::planes>([&](auto plane) {
        unrolled<rows>([&](auto r) {
          const __m512i weight = states.template level<plane>(windows[r]);
          unrolled<shape.sums()>([&](auto i) {
            sums[r][i] = Int8Vector::add_in_tile(sums[r][i], weight, _mm512_loadu_si512(x + i * chunk));
          });
        });
        x += shape.bytes();
      });
    }
    add_sums<parts>(sums, weights.lanes, scales, totals);
    weights.next_group();
  }
  __m512 all[rows][count];  // Not `totals`, which would not stay in registers.
  unrolled<rows>([&](auto r) { unrolled<count>([&](auto i) { all[r][i] = totals[r][i]; }); });
  write(p, weights, row, all);
}

template <int bits>
void run_states(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  const Product order = in_order_of_decoding(p);
  Operands<UnpackedBytes> from(order, end);
  LinearTable levels = *p.linear_table;
  for (uint8_t& level : levels.levels) level ^= 128;  // The instruction reads unsigned weights.
  const States<bits>& states = States<bits>::of(levels);
  const float* const units = reinterpret_cast<const float*>(scratch + units_at(order, 0));
  with_constant<most_rows>(static_cast<int>(p.m), [&](auto count) {
    with_constant<2>(p.parts, [&](auto parts) {
      by_fours(begin, end, [&](auto rows, int64_t row) {
        run_tile<bits, rows, count, parts>(p, order, from, states, row, scratch, units, units_of_row(order));
      });
    });
  });
}

}  // namespace
}  // namespace few_rows
EQQUANT_END

namespace eqquant {

using namespace gfni::few_rows;

bool serves_states(const Product& p) {
  // A block has one sum, and its high bits are in one register.
  return p.has_history && p.m <= most_rows && p.run <= 256;
}

int64_t scratch_of_states(const Product& p) { return scratch_size(in_order_of_decoding(p)); }

void prepare_states(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const Geometry of(p);
  const Product order = in_order_of_decoding(p);
  std::vector<float> x(order.packed);
  prepare_rows(p, order, scratch, begin, end, [&](const float* row) {
    float* to = x.data();
    for (int64_t b = 0; b < p.blocks; b++, row += p.run)
      for (int64_t j = 0; j < of.columns; j += gfni::chunk)
        for (int64_t plane = 0; plane < of.planes; plane++, to += gfni::chunk)
          for (int64_t k = 0; k < std::min(gfni::chunk, of.columns - j); k++) to[k] = row[(j + k) * of.planes + plane];
    return static_cast<const float*>(x.data());
  });
}

void run_states(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  const auto run = p.stored_bits == 2   ? gfni::few_rows::run_states<2>
                   : p.stored_bits == 3 ? gfni::few_rows::run_states<3>
                                        : gfni::few_rows::run_states<4>;
  run(p, scratch, begin, end);
}

}  // namespace eqquant
