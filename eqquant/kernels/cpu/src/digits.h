// Products in int8, with activations split in digits, for any `Integers`: some bytes at a
// time, of which products are added up by fours. Included into a namespace, and under a
// target, after these, and after a `multiply_decoded` for them.
//
// A row of the activation is `unit * (high + low / 254)`, two rows of int8, which is 15
// bits of it. Where the instruction wants one operand to be unsigned, levels are made so by
// an offset; what that adds to a sum is known from the activation. Sums are of 32 bits and
// wrap around, which is right as long as the true sum fits.

constexpr float low_per_high = 254;

// What is known of a row of the activation beside its digits.
struct Row {
  float unit;
  uint32_t sums[2];
};

using Bytes = Integers::Bytes;
using Sums = Integers::Sums;

inline int64_t plane_stride(const Product& p) {
  return (p.packed + Integers::size - 1) / Integers::size * Integers::size;
}
inline int64_t digit_stride(const Product& p) { return plane_stride(p) * p.planes(); }

// Scratch is the digits (m, digits, plane, byte), each plane filled up with zeros, and
// then the rows.
inline int8_t* digits_in(const Product&, char* scratch) { return reinterpret_cast<int8_t*>(scratch); }
inline Row* rows_in(const Product& p, char* scratch) {
  return reinterpret_cast<Row*>(scratch + p.m * p.digits * digit_stride(p));
}

inline int64_t scratch_size(const Product& p) {
  return p.m * (p.digits * digit_stride(p) + static_cast<int64_t>(sizeof(Row)));
}

inline void prepare(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const int64_t columns = p.columns(), stride = plane_stride(p);
  for (int64_t i = begin; i < end; i++) {
    const float* x = p.x + i * columns;
    int8_t* digits = digits_in(p, scratch) + i * p.digits * digit_stride(p);
    Row& row = rows_in(p, scratch)[i];
    const float absmax = Integers::absmax_of(x, columns);
    row.unit = std::isfinite(absmax) ? absmax / 127 : NAN;
    const float per_unit = 127 / absmax;
    if (!std::isfinite(per_unit) && std::isfinite(absmax)) row.unit = 0;
    const float factor = std::isfinite(per_unit) ? per_unit : 0;
    for (int64_t at = p.packed; at < stride; at++)
      for (int plane = 0; plane < p.digits * p.planes(); plane++)
        digits[plane * stride + at] = 0;
    Sums sums[2] = {Integers::zero(), Integers::zero()};
    for_each_run(p, 0, p.packed, [&](int64_t logical, int64_t planar, int64_t length) {
      int8_t* high = digits + planar / p.packed * stride + planar % p.packed;
      if (p.digits == 1)
        Integers::split<1>(x + logical, length, factor, high, nullptr, sums);
      else
        Integers::split<2>(x + logical, length, factor, high, high + digit_stride(p), sums);
    });
    for (int digit = 0; digit < 2; digit++)
      row.sums[digit] = Integers::total(sums[digit]);
  }
}

// The levels as bytes, and by how much they are too large.
struct ByteLevels {
  Bytes table;
  uint32_t offset;
};

inline ByteLevels byte_levels(const Product& p) {
  alignas(16) uint8_t table[16] = {};
  if (p.bits == 8) return {Integers::table(table), Integers::middle};
  float least = 0;
  for (int i = 0; Integers::middle && i < 16; i++) least = std::min(least, p.levels[i]);
  for (int i = 0; i < 16; i++)
    table[i] = static_cast<uint8_t>(static_cast<int>(p.levels[i] - least));
  return {Integers::table(table), static_cast<uint32_t>(-least)};
}

// What is left of a row from byte `j` on, at most a register of it.
EQQUANT_INLINE Bytes bytes_at(const Product& p, const uint8_t* row, int64_t j) {
  const int64_t left = p.packed - j;
  return left >= Integers::size ? Integers::load(row + j) : Integers::load(row + j, left);
}

// Products of some rows of the weight. Sums are in `parts`, so that no addition has to wait
// for the one before.
template <int bits, int rows, int count, int parts>
struct Tile {
  Sums sums[parts][count * rows];

  template <int plane>
  static EQQUANT_INLINE void multiply(Bytes table, const Bytes* codes, const int8_t* x,
                                      int64_t stride, Sums* sums) {
    Bytes weight[rows];
    for (int r = 0; r < rows; r++)
      weight[r] = Integers::template decode<bits, plane>(table, codes[r]);
    for (int i = 0; i < count; i++) {
      const Bytes digits = Integers::load(x + (i * (8 / bits) + plane) * stride);
      for (int r = 0; r < rows; r++)
        sums[i * rows + r] = Integers::add(sums[i * rows + r], weight[r], digits);
    }
    if constexpr ((plane + 1) * bits < 8) multiply<plane + 1>(table, codes, x, stride, sums);
  }

  static EQQUANT_INLINE void step(const Product& p, Bytes table, const uint8_t* codes,
                                  const int8_t* x, int64_t stride, int64_t j, Sums* sums) {
    Bytes some_codes[rows];
    for (int r = 0; r < rows; r++) {
      const uint8_t* of_row = codes + r * p.packed;
      some_codes[r] = bytes_at(p, of_row, j);
      rows == 1 ? prefetch_near(of_row + j) : prefetch(of_row + j);
    }
    multiply<0>(table, some_codes, x + j, stride, sums);
  }

  // `x` is `count` rows of digits, from row `first` of all on.
  EQQUANT_INLINE void run(const Product& p, const ByteLevels& levels, const int8_t* x,
                          const Row* of, const float* scales, int64_t row, int64_t first) {
    const int64_t stride = plane_stride(p);
    const uint8_t* codes = p.codes + row * p.packed;
    for (auto& part : sums)
      for (auto& sum : part) sum = Integers::zero();
    int64_t j = 0;
    for (; j + parts * Integers::size <= p.packed; j += parts * Integers::size)
      for (int k = 0; k < parts; k++)
        step(p, levels.table, codes, x, stride, j + k * Integers::size, sums[k]);
    for (; j < p.packed; j += Integers::size)
      step(p, levels.table, codes, x, stride, j, sums[0]);
    constexpr int of_part = count * rows, all = parts * of_part;
    alignas(16) uint32_t total[(all + 3) / 4 * 4];
    for (int i = 0; i < all; i += 4) {
      Sums four[4];
      for (int k = 0; k < 4; k++)
        four[k] = i + k < all ? sums[(i + k) / of_part][(i + k) % of_part] : Integers::zero();
      Integers::store_totals(total + i, four);
    }
    for (int i = of_part; i < all; i++) total[i % of_part] += total[i];
    for (int i = 0; i < count; i += p.digits) {
      const int64_t m = (first + i) / p.digits;
      for (int r = 0; r < rows; r++) {
        const auto digit = [&](int d) {
          const uint32_t sum = total[(i + d) * rows + r] - levels.offset * of[m].sums[d];
          return static_cast<float>(static_cast<int32_t>(sum));
        };
        const float sum = p.digits == 1 ? digit(0) : digit(0) + digit(1) / low_per_high;
        p.y[m * p.rows + row + r] = sum * of[m].unit * scales[r];
      }
    }
  }
};

template <int bits, int rows, int parts = 1>
void all_digits(const Product& p, const ByteLevels& levels, char* scratch, int64_t row) {
  float buffer[rows];
  const float* scales = scales_of(p, row, rows, buffer);
  const int8_t* x = digits_in(p, scratch);
  const Row* of = rows_in(p, scratch);
  const int64_t count = p.m * p.digits, ld = digit_stride(p);
  int64_t i = 0;
  for (; i + 4 <= count; i += 4)
    Tile<bits, rows, 4, parts>().run(p, levels, x + i * ld, of, scales, row, i);
  for (; i + 2 <= count; i += 2)
    Tile<bits, rows, 2, parts>().run(p, levels, x + i * ld, of, scales, row, i);
  for (; i < count; i++)
    Tile<bits, rows, 1, parts>().run(p, levels, x + i * ld, of, scales, row, i);
}

template <int bits>
void some_rows(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const ByteLevels levels = byte_levels(p);
  int64_t row = begin;
  // One row of the activation is bound by memory where codes need no decoding, and memory is
  // read fastest from one end to the other.
  if constexpr (bits == 8)
    if (p.m == 1)
      for (; row < end; row++) all_digits<bits, 1, 2>(p, levels, scratch, row);
  for (; row + 4 <= end; row += 4) all_digits<bits, 4>(p, levels, scratch, row);
  for (; row < end; row++) all_digits<bits, 1>(p, levels, scratch, row);
}

//
// For more rows of the activation, and for weights whose levels are not integers of one
// unit: four rows are decoded once, into the innermost cache.
//

constexpr int at_once = 4, most_digits = 6;
constexpr int64_t few_digits = 8;
// The digits that a second-level cache holds, beside the rest: more are taken in turns.
constexpr int64_t cached_bytes = 1 << 19;

// Whether the levels of a row are integers of one unit as they are.
inline bool is_exact(const Product& p) {
  if (p.blocks > 1) return false;
  for (int i = 0; p.bits < 8 && i < 16; i++)
    if (p.levels[i] != std::nearbyint(p.levels[i])) return false;
  return true;
}

struct alignas(Integers::size) Register {
  uint8_t bytes[Integers::size];
};

// A row of a weight with a scale for each block, rounded to integers of one unit: 127 of
// them are its largest scale times the largest level. Returns that unit.
template <int bits>
float round_row(const Product& p, const float* scales, float largest, const uint8_t* codes,
                uint8_t* to) {
  const int64_t block = p.block_bytes(), stride = plane_stride(p);
  float most = 0;
  for (int64_t b = 0; b < p.blocks; b++) {
    if (!std::isfinite(scales[b])) return NAN;
    most = std::max(most, std::fabs(scales[b]));
  }
  const float unit = most * largest / 127;
  const float per_unit = unit > 0 && std::isfinite(1 / unit) ? 1 / unit : 0;
  for (int64_t b = 0, j = 0; b < p.blocks; b++, j += block)
    Integers::round_block<bits>(p.levels, scales[b] * per_unit, block, codes + j, to + j, stride);
  return unit;
}

// A row as bytes, in the order of digits.
template <int bits, int plane = 0>
void decode_row(const Product& p, Bytes table, const uint8_t* codes, uint8_t* to) {
  for (int64_t j = 0; j < p.packed; j += Integers::size)
    Integers::store(to + plane * plane_stride(p) + j,
                    Integers::template decode<bits, plane>(table, bytes_at(p, codes, j)));
  if constexpr ((plane + 1) * bits < 8) decode_row<bits, plane + 1>(p, table, codes, to);
}

template <int bits>
void many_digits(const Product& p, char* scratch, int64_t begin, int64_t end) {
  ByteLevels levels{Bytes{}, Integers::middle};
  float largest = bits == 8 ? 127 : 0;
  const bool exact = is_exact(p);
  if (exact) levels = byte_levels(p);
  for (int i = 0; bits < 8 && i < 16; i++) largest = std::max(largest, std::fabs(p.levels[i]));
  const int8_t* x = digits_in(p, scratch);
  const Row* of = rows_in(p, scratch);
  const int64_t stride = digit_stride(p), count = p.m * p.digits;
  // Whole rows of the activation at a time: one digit or two of each.
  const int64_t in_turn =
      std::max<int64_t>(1, cached_bytes / stride / most_digits) * most_digits;
  std::vector<Register> decoded(at_once * stride / Integers::size);
  uint8_t* w = decoded[0].bytes;
  std::vector<float> buffer(p.bfloat16_scales ? at_once * p.blocks : 0);
  for (int64_t first = 0; first < count; first += in_turn)
    for (int64_t row = begin; row < end; row += at_once) {
      const int rows = static_cast<int>(std::min<int64_t>(at_once, end - row));
      const float* scales = scales_of(p, row, rows, buffer.data());
      alignas(16) float units[at_once] = {};
      for (int r = 0; r < rows; r++) {
        const uint8_t* codes = p.codes + (row + r) * p.packed;
        if (exact) {
          units[r] = scales[r];
          decode_row<bits>(p, levels.table, codes, w + r * stride);
        } else {
          units[r] = round_row<bits>(p, scales + r * p.blocks, largest, codes, w + r * stride);
        }
      }
      const int64_t last = std::min(count, first + in_turn);
      for (int64_t i = first; i < last; i += most_digits) {
        alignas(64) uint32_t totals[most_digits * at_once];
        const int8_t* some = x + i * stride;
        switch (std::min<int64_t>(most_digits, last - i)) {
          case 1: multiply_decoded<at_once, 1>(w, some, stride, totals); break;
          case 2: multiply_decoded<at_once, 2>(w, some, stride, totals); break;
          case 3: multiply_decoded<at_once, 3>(w, some, stride, totals); break;
          case 4: multiply_decoded<at_once, 4>(w, some, stride, totals); break;
          case 5: multiply_decoded<at_once, 5>(w, some, stride, totals); break;
          default: multiply_decoded<at_once, most_digits>(w, some, stride, totals);
        }
        for (int64_t k = 0; k < std::min<int64_t>(most_digits, last - i); k += p.digits) {
          const int64_t m = (i + k) / p.digits;
          const float unit = of[m].unit;
          alignas(16) float sums[at_once];
          for (int r = 0; r < at_once; r++) {
            const auto digit = [&](int d) {
              const uint32_t sum = totals[(k + d) * at_once + r] - levels.offset * of[m].sums[d];
              return static_cast<float>(static_cast<int32_t>(sum));
            };
            const float sum = p.digits == 1 ? digit(0) : digit(0) + digit(1) / low_per_high;
            sums[r] = sum * unit * units[r];
          }
          float* y = p.y + m * p.rows + row;
          if (rows == at_once)
            std::memcpy(y, sums, sizeof sums);
          else
            std::memcpy(y, sums, rows * sizeof(float));
        }
      }
    }
}

template <int bits>
void digits_of(const Product& p, char* scratch, int64_t begin, int64_t end) {
  const bool few = p.m * p.digits <= few_digits && is_exact(p);
  few ? some_rows<bits>(p, scratch, begin, end) : many_digits<bits>(p, scratch, begin, end);
}

inline void run(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  char* from = const_cast<char*>(scratch);  // It is only read.
  with_bits(p, [&](auto bits) { digits_of<bits>(p, from, begin, end); });
}

inline const char* why_not(const Product& p) {
  if (p.exponent) return "floats of 8 bits need a float kernel";
  if (p.digits == 2 && p.blocks != 1) return "two digits need one scale for each row";
  return nullptr;
}

constexpr Routine digits_routine = {prepare, run, scratch_size, 8, why_not};
