// int8 x @ w.T for one or two rows of the activation and codes with a history, which are decoded in registers. Levels
// are used in the order in which they are decoded: plane by plane, 64 columns at a time. So the activation is brought
// into this order. Other instruction sets, and more rows, read levels that decode/unpack_states.h wrote to a cache.
#define EQQUANT_TARGET_GFNI
#include <type_traits>
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

// Loads windows of columns: the bytes of 64 columns, and those of the columns before.
template <int bits>
class Loads {
  using Of = States<bits>;
  using Window = typename Of::Window;

  const int64_t columns, half;
  __mmask64 first_half, second_half;
  __m512i earlier[2], second_by_one;

 public:
  explicit Loads(const Geometry& of)
      : columns(of.columns), half(of.columns / 2), first_half(first_bytes(half)),
        second_half(first_bytes(columns) & ~first_half) {
    alignas(64) uint8_t index[chunk];
    for (int back = 0; back < 2; back++) {
      for (int i = 0; i < chunk; i++) index[i] = static_cast<uint8_t>(i - back - 1);
      earlier[back] = _mm512_load_si512(index);
    }
    second_by_one = _mm512_inserti64x4(_mm512_setzero_si512(), _mm256_set1_epi16(1), 1);
  }
  // True if a block has 64 columns from `column` on. Masked loads take 10% of the time of a product (Zen 4).
  bool is_whole(int64_t column) const { return column + chunk <= columns; }

  template <bool whole>
  EQQUANT_INLINE void read(const uint8_t* block, int64_t column, Window& window) const {
    const __mmask64 some = whole ? ~__mmask64{0} : first_bytes(columns - column);
    window[0] = _mm512_maskz_loadu_epi8(some, block + column);
    unrolled<Of::columns_of_window - 1>([&](auto back) {
      window[back + 1] = column ? _mm512_maskz_loadu_epi8(some, block + column - back - 1)
                                : _mm512_maskz_permutexvar_epi8(~first_bytes(back + 1), earlier[back], window[0]);
    });
    if constexpr (bits == 3) {
      constexpr int at = Of::columns_of_window;
      window[at] = whole ? both_halves(block + columns) : halves(block + columns);
      window[at + 1] = _mm512_maskz_permutexvar_epi8(~first_bytes(1), earlier[0], window[at]);
    }
  }

 private:
  // The high bits of codes of 3 bits of a block, which has at most 64 columns.
  EQQUANT_INLINE __m512i halves(const uint8_t* high) const {
    const __m512i second = _mm512_maskz_loadu_epi8(second_half, high - half);
    return _mm512_or_si512(_mm512_maskz_loadu_epi8(first_half, high), ByteVector::halve(second));
  }
  EQQUANT_INLINE __m512i both_halves(const uint8_t* high) const {
    const __m256i all = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(high));
    return _mm512_srlv_epi16(_mm512_broadcast_i64x4(all), second_by_one);
  }
};

template <int bits, int rows, int count, int parts>
void run_tile(const Product& p, const Product& order, Operands<UnpackedBytes>& from, const States<bits>& states,
              const Loads<bits>& loads, int64_t row, const char* x, const float* units, int64_t stride) {
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
      weights.next_span();
      scale_units(weights, units, stride, scales);
    }
    __m512i sums[rows][shape.sums()];
    unrolled<shape.sums()>([&](auto i) {
      const __m512i correction = _mm512_loadu_si512(x + shape.correction(i) * chunk);
      unrolled<rows>([&](auto r) { sums[r][i] = correction; });
    });
    for (int64_t j = 0; j < of.columns; j += chunk) {
      if constexpr (States<bits>::planes == 4) keep_in_loop();  // 5% to 15% less time; 4% more with two planes.
      typename States<bits>::Window windows[rows];
      const auto load = [&](auto whole) {
        unrolled<rows>([&](auto r) { loads.template read<whole>(codes + r * of_row, j, windows[r]); });
      };
      loads.is_whole(j) ? load(std::true_type()) : load(std::false_type());
      unrolled<rows>([&](auto r) {
        const uint8_t* const at = codes + r * of_row + j;
        prefetch(at, far), prefetch_near(at);
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
  const Loads<bits> loads((Geometry(p)));
  const float* const units = reinterpret_cast<const float*>(scratch + units_at(order, 0));
  with_constant<most_rows>(static_cast<int>(p.m), [&](auto count) {
    with_constant<2>(p.parts, [&](auto parts) {
      by_tiles<4>(begin, end, [&](int64_t row) {
        run_tile<bits, 4, count, parts>(p, order, from, states, loads, row, scratch, units, units_of_row(order));
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
  return p.has_history && p.m <= most_rows && p.run <= 256 && p.rows >= gfni::rows_of_tile;
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
