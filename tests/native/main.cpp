// Compares the routines of the native kernels with plain loops, without XLA. `make sanitize` runs this under
// AddressSanitizer and UndefinedBehaviorSanitizer, so every operand is a heap block of its exact size.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "decode/states.h"
#include "decode/unpack.h"
#include "encode/hadamard.h"
#include "encode/relayout.h"
#include "runtime/loop.h"
#include "runtime/machine.h"
#include "runtime/read_ahead.h"

using eqquant::Product;
using eqquant::Routine;
using eqquant::ScaleType;

#if !defined(__aarch64__)
namespace eqquant {
extern StatesUnpacker unpack_states_avx2;
}
#endif

namespace {

struct Case {
  const char* name;
  const Routine* routine;
  bool contract_rows;
  int parts, needs;
  bool integers;  // Activations are rounded to integers.
  bool exact;     // Weights must be integers with a scale for each row.
  bool float8;    // Codes may be float8.
  double tolerance;
};

double tolerance_of(const std::string& name) {
  const std::string how = name.substr(0, name.find(','));
  if (how == "float") return 8e-6;  // Sums of 122,880 floats, eight at a time, add 15,360 roundings: 124 * 6e-8.
  if (how == "int8") return 4e-2;
  // Sums of int16 must fit into int32, which leaves activations 12 bits in blocks of 1,280 columns.
  return how == "bfloat16" ? 1e-2 : 3e-4;
}

std::mt19937 generator(0);
int below(int n) { return static_cast<int>(generator() % n); }

// Returns code `i` of a group of `size` codes with one or two parts. See decode/unpack.h.
int code_of(const uint8_t* group, int64_t size, int bits, int64_t i) {
  const int low_bits = bits < 4 ? 2 : 4, high_bits = bits - low_bits;
  const int64_t lows = size * low_bits / 8, highs = size * high_bits / 8;
  const int low = group[i % lows] >> (low_bits * (i / lows)) & ((1 << low_bits) - 1);
  if (!high_bits) return low;
  const int high = group[lows + i % highs] >> (high_bits * (i / highs)) & ((1 << high_bits) - 1);
  return low | high << low_bits;
}

// Random scales of a type between about 0.5 and 2, or integers that differ by as much, and their values.
void make_scale(ScaleType type, uint8_t* to) {
  std::normal_distribution<float> normal;
  const float x = 0.5f + std::abs(normal(generator));
  const uint16_t half = static_cast<uint16_t>(0x3800 + below(0x400));
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  const uint16_t upper = static_cast<uint16_t>(bits >> 16);
  switch (type) {
    case ScaleType::float32: std::memcpy(to, &x, 4); break;
    case ScaleType::bfloat16: std::memcpy(to, &upper, 2); break;
    case ScaleType::float16: std::memcpy(to, &half, 2); break;
    case ScaleType::uint8: *to = static_cast<uint8_t>(100 + below(156)); break;
    case ScaleType::int8: *to = static_cast<uint8_t>(64 + below(64)); break;
    case ScaleType::low_nibble: *to = static_cast<uint8_t>(8 + below(8) + 16 * below(16)); break;
    case ScaleType::high_nibble: *to = static_cast<uint8_t>(16 * (8 + below(8)) + below(16)); break;
    case ScaleType::exponent: *to = static_cast<uint8_t>(126 + below(3)); break;
    case ScaleType::float8: *to = static_cast<uint8_t>(0x30 + below(16)); break;
  }
}
double scale_at(ScaleType type, const void* scales, int64_t i) {
  const uint8_t* at = static_cast<const uint8_t*>(scales) + i * eqquant::size_of(type);
  float x;
  uint16_t half;
  switch (type) {
    case ScaleType::float32: std::memcpy(&x, at, 4); return x;
    case ScaleType::bfloat16: std::memcpy(&half, at, 2); return eqquant::from_bfloat16(half);
    case ScaleType::float16: std::memcpy(&half, at, 2); return (1 + (half & 1023) / 1024.0) / 2;
    case ScaleType::int8: return static_cast<int8_t>(*at);
    case ScaleType::low_nibble: return *at & 15;
    case ScaleType::high_nibble: return *at >> 4;
    case ScaleType::exponent: return std::ldexp(1, *at - 127);
    case ScaleType::float8: return (1 + (*at & 7) / 8.0) * std::ldexp(1, (*at >> 3) - 7);
    default: return *at;
  }
}

double float_of_8_bits(uint8_t code, int exponent_bits) {
  const int mantissa_bits = 7 - exponent_bits, bias = (1 << (exponent_bits - 1)) - 1;
  const int exponent = (code & 127) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
  const int whole = exponent ? mantissa + (1 << mantissa_bits) : mantissa;
  const double size = std::ldexp(whole, std::max(exponent, 1) - bias - mantissa_bits);
  return code & 128 ? -size : size;
}

// Returns the level of the code at byte j of a row, in one plane. See runtime/product.h.
double level_of(const Product& p, int64_t row, int64_t j, int plane) {
  if (p.is_unpacked()) {
    const uint8_t* group = p.stored(row) + j / p.run * (p.run * p.stored_bits / p.bits);
    const int code = code_of(group, p.run * p.planes(), p.stored_bits, plane * p.run + j % p.run);
    return p.bits == 8 ? code - p.largest_integer() : p.levels[code];
  }
  const uint8_t byte = p.codes[row * p.packed + j];
  // The scales contain the factor that a routine leaves to them.
  if (p.exponent) return float_of_8_bits(byte, p.exponent) / (p.exponent == 4 ? 256 : 1);
  return p.bits == 8 ? static_cast<int8_t>(byte) : p.levels[byte >> (plane * p.bits) & 15];
}

// Returns the upper half of a float, which is a bfloat16.
uint16_t rounded_down(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return static_cast<uint16_t>(bits >> 16);
}

// Returns the number of a block.
double number_of(const eqquant::Scales& s, int64_t blocks, int64_t row, int64_t block) {
  const double inner = scale_at(s.type, s.inner, row * blocks + block);
  if (!s.outer_blocks) return inner;
  return inner * scale_at(s.outer_type, s.outer, row * s.outer_count(blocks) + block / s.outer_blocks);
}

// Returns the decoded weight.
std::unique_ptr<double[]> decode(const Product& p) {
  std::unique_ptr<double[]> w(new double[p.rows * p.columns()]);
  for (int64_t row = 0; row < p.rows; row++)
    for (int64_t j = 0; j < p.packed; j++)
      for (int plane = 0; plane < p.planes(); plane++) {
        const double level = level_of(p, row, j, plane);
        const int64_t block = j / p.block_bytes();
        const double scale = number_of(p.scales, p.blocks, row, block);
        const double offset = p.offsets.inner ? number_of(p.offsets, p.blocks, row, block) : 0;
        const int64_t logical = (j / p.run * p.planes() + plane) * p.run + j % p.run;
        w[row * p.columns() + logical] = (level + p.shift) * scale + offset;
      }
  return w;
}

// Runs a routine in two pieces, like two threads.
void run(const Routine& routine, const Routine& of_offsets, const Product& p, char* scratch, char* sums) {
  const int64_t units = p.contract_rows ? p.packed : p.rows;
  const int64_t grain = routine.grain(p);
  const int64_t half = (units / 2 + grain - 1) / grain * grain;
  const int64_t cut = units < half + grain ? units : half;
  routine.prepare(p, scratch, 0, p.m / 2);
  routine.prepare(p, scratch, p.m / 2, p.m);
  if (p.offsets.inner) of_offsets.prepare(p, sums, 0, p.m);
  const auto part = [&](int64_t begin, int64_t end) {
    eqquant::run_units(routine, p, scratch, begin, end);
    if (p.offsets.inner) of_offsets.run(p, sums, begin, end);
  };
  part(0, cut);
  if (cut < units) part(cut, units);
}

// Scratch, aligned as XLA aligns its buffers.
std::unique_ptr<char, void (*)(void*)> scratch_of(const Routine& routine, const Product& p) {
  const int64_t size = (routine.scratch(p) + 64) / 64 * 64;
  return {static_cast<char*>(std::aligned_alloc(64, size)), std::free};
}

bool check(const Case& c) {
  std::normal_distribution<float> normal;
  Product p{};
  const bool floats = !c.routine->why_not;
  // The last two kinds are float8.
  const int kind = below(c.float8 ? 9 : 7);
  p.stored_bits = std::array<int, 9>{1, 2, 3, 4, 5, 6, 8, 8, 8}[kind];
  p.bits = p.stored_bits == 3 ? 4 : p.stored_bits > 4 ? 8 : p.stored_bits;
  p.exponent = kind > 6 ? kind - 3 : 0;
  p.parts = c.parts;
  p.contract_rows = c.contract_rows;
  const bool integers = c.integers && (c.exact || below(2));
  const int least = c.exact || below(4) ? -2 : 150;  // Levels beyond int8.
  std::unique_ptr<float[]> levels(new float[16]);
  for (int i = 0; i < 16; i++) {
    const int code = i & ((1 << std::min(p.stored_bits, 4)) - 1);
    levels[i] = integers ? static_cast<float>(code % 5 + least) : code * 0.3f - 1;
  }
  p.levels = levels.get();
  p.level_unit = integers && (c.exact || below(2)) ? 1 : 0;
  // Products with few rows unpack codes of 5 and 6 bits in registers.
  p.m = 1 + below((p.stored_bits == 5 || p.stored_bits == 6) && below(2) ? 3 : 40);
  if (floats && p.m > 30) p.m *= 3;  // Enough for panels, whatever the vectors.
  p.rows = 1 + below(90);
  // Some routines require small levels, whatever the blocks: draw others.
  p.blocks = 1, p.packed = p.run = 64;
  if (!floats && c.routine->why_not(p)) return check(c);
  // Blocks of whole runs. Some routines require one scale per row, unless there are few rows of the activation.
  p.run = p.stored_bits == 3 && below(2) ? 4 * (2 + below(5)) : 8 << (below(8) ? below(3) : 6);
  if (p.stored_bits == 2 && !below(4)) p.bits = 4, p.run = 8;  // Blocks of 16 codes, which are unpacked.
  // Long blocks of codes of 8 bits are exact in some routines.
  const bool is_long = p.bits == 8 && !below(3);
  if (is_long) p.run = 64 * (2 + below(3));
  // Often one run of eight bytes, the shortest possible block. Sometimes more blocks than a vector has scales.
  const int64_t runs = 1 + (is_long ? 0 : below(2) * below(6)), most = runs == 1 && p.run <= 32 ? 40 : 5,
                blocks = 1 + below(below(2) ? most : 5);
  if (c.exact && below(2)) p.m = 1 + below(2);
  const bool one_scale = below(2);
  p.packed = runs * p.run * blocks;
  p.blocks = one_scale ? 1 : blocks;
  if (!floats && c.routine->why_not(p)) p.blocks = 1;
  if (p.stored_bits == 8 && p.blocks == 1) p.packed = p.run = 1 + below(300);
  // Or rows of whole vectors.
  for (; !floats && c.routine->why_not(p); p.packed *= 2) p.blocks = 1;
  if (p.columns() < 512 && !below(8)) p.rows += below(1500);  // More rows than are decoded at once.
  for (eqquant::Scales* s : {&p.scales, &p.offsets}) {
    s->type = static_cast<ScaleType>(below(2) ? 0 : below(9));
    s->outer_type = ScaleType::float16;
    s->outer_blocks = below(2) ? 0 : 1 << below(5);
  }
  const bool has_offsets = below(2);
  p.shift = has_offsets ? static_cast<float>(below(3)) : 0;
  p.bfloat16_x = below(2);
  p.rounds_x = c.parts != 1 && !below(4);

  const int64_t in = p.contract_rows ? p.rows : p.columns();
  const int64_t out = p.contract_rows ? p.columns() : p.rows;
  std::unique_ptr<float[]> x(new float[p.m * in]), y(new float[p.m * out]);
  std::unique_ptr<uint16_t[]> narrow_x(new uint16_t[p.m * in]);
  for (int64_t i = 0; i < p.m * in; i++) {
    x[i] = normal(generator);
    narrow_x[i] = rounded_down(x[i]);
    if (p.bfloat16_x) x[i] = eqquant::from_bfloat16(narrow_x[i]);
  }
  std::unique_ptr<float[]> expected_x(new float[p.m * in]);
  for (int64_t m = 0; m < p.m; m++) {
    float absmax = 0;
    for (int64_t k = 0; k < in; k++) absmax = std::max(absmax, std::abs(x[m * in + k]));
    for (int64_t k = 0; k < in; k++) {
      const float value = x[m * in + k], rounded = std::rint(value * (127 / absmax)) * (absmax / 127);
      // The int8 routines round by themselves.
      expected_x[m * in + k] = p.rounds_before() ? rounded : value;
    }
  }
  std::unique_ptr<uint8_t[]> codes(new uint8_t[p.rows * p.stored_bytes()]);
  for (int64_t i = 0; i < p.rows * p.stored_bytes(); i++) {
    codes[i] = static_cast<uint8_t>(generator());
    // Avoid infinities and NaN.
    if (p.exponent && (codes[i] & 127) > (p.exponent == 4 ? 126 : 123)) codes[i] = 1;
  }
  const auto make_scales = [](ScaleType type, int64_t count) {
    std::unique_ptr<uint8_t[]> out(new uint8_t[count * eqquant::size_of(type)]);
    for (int64_t i = 0; i < count; i++) make_scale(type, out.get() + i * eqquant::size_of(type));
    return out;
  };
  std::vector<std::unique_ptr<uint8_t[]>> numbers;
  for (eqquant::Scales* s : {&p.scales, &p.offsets}) {
    if (s == &p.offsets && !has_offsets) continue;
    numbers.push_back(make_scales(s->type, p.rows * p.blocks));
    s->inner = numbers.back().get();
    numbers.push_back(make_scales(s->outer_type, p.rows * s->outer_count(p.blocks)));
    s->outer = numbers.back().get();
  }
  p.x = p.bfloat16_x ? static_cast<void*>(narrow_x.get()) : x.get();
  p.codes = codes.get(), p.y = y.get();
  const Routine& of_offsets = eqquant::offsets_routine(c.needs);
  const auto scratch = scratch_of(*c.routine, p), sums = scratch_of(of_offsets, p);
  run(*c.routine, of_offsets, p, scratch.get(), sums.get());

  const auto w = decode(p);
  double error = 0, norm = 0;
  for (int64_t m = 0; m < p.m; m++)
    for (int64_t n = 0; n < out; n++) {
      double sum = 0;
      // The norm of the terms, because most of the sum may cancel.
      for (int64_t k = 0; k < in; k++) {
        const double term = expected_x[m * in + k] * (p.contract_rows ? w[k * out + n] : w[n * in + k]);
        sum += term, norm += term * term;
      }
      error += std::pow(y[m * out + n] - sum, 2);
    }
  const double relative = std::sqrt(error / norm);
  // A lane of int16 has the sum of 32 products of 1-bit codes, so activations keep one bit less.
  const bool int16 = !floats && !c.parts;
  if (relative <= c.tolerance * (int16 && p.stored_bits == 1 ? 2 : 1)) return true;
  std::printf("%s%s: error %.1e; m %ld rows %ld packed %ld blocks %ld bits %d exponent %d run %ld\n",
              c.name, c.contract_rows ? ", x @ w" : "", relative, long(p.m), long(p.rows), long(p.packed), long(p.blocks), p.stored_bits, p.exponent, long(p.run));
  return false;
}

// Checks that all instruction sets round to the same bits, and that no value moves by more than the largest magnitude
// of its block.
bool check_rounding() {
  using eqquant::Levels;
  std::normal_distribution<float> normal;
  const int64_t rows = 1 + below(5), block = 1 + below(300), size = block * (1 + below(4));
  std::unique_ptr<float[]> x(new float[rows * size]), a(new float[rows * size]),
      b(new float[rows * size]), boundaries(new float[15]), levels(new float[16]);
  std::unique_ptr<bool[]> problems(new bool[rows]);
  for (int64_t i = 0; i < rows * size; i++) x[i] = normal(generator);
  for (int i = 0; i < 16; i++) levels[i] = i / 7.5f - 1;
  for (int i = 0; i < 15; i++) boundaries[i] = (levels[i] + levels[i + 1]) / 2;
  eqquant::Rounding r{x.get(), boundaries.get(), levels.get(), a.get(), problems.get(),
                      size, block, static_cast<Levels>(below(4)), 1e38f,
                      below(2) != 0, below(2) != 0};
  eqquant::rounder(1)(r, 0, rows / 2);
  eqquant::rounder(1)(r, rows / 2, rows);
  bool fine = true;
  for (int64_t i = 0; i < rows * size; i += block) {
    float absmax = 0;
    for (int64_t j = 0; j < block; j++) absmax = std::max(absmax, std::abs(x[i + j]));
    for (int64_t j = 0; j < block; j++) fine &= std::abs(a[i + j] - x[i + j]) <= absmax * 1.001f;
  }
  r.y = b.get();
  eqquant::rounder(eqquant::instructions())(r, 0, rows);
  fine &= !std::memcmp(a.get(), b.get(), rows * size * sizeof(float));
  if (!fine)
    std::printf("rounding: wrong; kind %d size %ld block %ld\n", int(r.kind), long(size),
                long(block));
  return fine;
}

// Compares a rotation with sums in double precision.
bool check_rotation() {
  std::normal_distribution<float> normal;
  const int64_t block = int64_t{1} << below(11), size = block * (1 + below(3));
  std::unique_ptr<float[]> x(new float[size]), y(new float[size]);
  for (int64_t i = 0; i < size; i++) x[i] = normal(generator);
  eqquant::hadamard(x.get(), y.get(), size, block);
  double worst = 0;
  for (int64_t i = 0; i < size; i++) {
    double sum = 0;
    // The sign is the parity of the common bits of both indices.
    for (int64_t j = 0; j < block; j++) sum += (__builtin_parityll(i % block & j) ? -1 : 1) * x[i / block * block + j];
    worst = std::max(worst, std::abs(sum / std::sqrt(double(block)) - y[i]));
  }
  if (worst > 2e-6) std::printf("rotation: wrong by %g; size %ld block %ld\n", worst, long(size), long(block));
  return worst <= 2e-6;
}

// Compares moves of bits with a loop over bits.
// Returns code `i` of a block of `run` codes with a history. See decode/states.h.
int code_with_history(const uint8_t* block, int64_t run, int bits, int64_t i) {
  if (bits == 4) return block[i / 2] >> 4 * (i % 2) & 15;
  const int low = block[i / 4] >> 2 * (i % 4) & 3;
  if (bits == 2) return low;
  const int64_t byte = i / 4, half = run / 8;
  const int pair = block[run / 4 + byte % half] >> 2 * (i % 4);
  return low | (pair >> (byte / half) & 1) << 2;
}

// Rows of codes with a history, decoded, and multiplied by all routines.
bool check_states(int best) {
  const int bits = 2 + below(3), needs = 1 + below(best);
  const int64_t run = below(2) ? 64 * (1 + below(5)) : 8 * (1 + below(60));
  Product p{};
  p.rows = 1 + below(20), p.blocks = 1 + below(below(2) ? 3 : 20), p.m = 1 + below(3);
  p.run = run, p.packed = run * p.blocks, p.stored_bits = bits, p.bits = 8, p.has_history = true, p.level_unit = 1;
  const int64_t groups = p.rows * p.blocks, bytes = run * bits / 8;
  // Often the table of an earlier call, with blocks of another size: the routines keep what they prepare for a table.
  static eqquant::LinearTable tables[5];
  eqquant::LinearTable& table = tables[bits];
  const bool is_new = std::all_of(table.masks, table.masks + 8, [](uint32_t mask) { return !mask; });
  if (is_new || !below(4)) {
    const int index_bits = 3 + bits - below(2), last = (1 << index_bits) - 1;
    table = {};
    for (int i = 0; i <= last / 2; i++) {
      const int level = below(255) - 127;
      table.levels[i] = static_cast<uint8_t>(level), table.levels[last - i] = static_cast<uint8_t>(-level);
    }
    for (int i = 0; i < index_bits; i++) table.masks[i] = 1 + below((1 << eqquant::state_bits) - 1);
  }
  std::unique_ptr<uint8_t[]> codes(new uint8_t[groups * bytes]), levels(new uint8_t[groups * run]);
  for (int64_t i = 0; i < groups * bytes; i++) codes[i] = static_cast<uint8_t>(below(256));
  p.codes = codes.get(), p.linear_table = &table, p.unpack_states = eqquant::states_unpacker(needs);
#if !defined(__aarch64__)
  if (needs == 1 && below(2)) p.unpack_states = eqquant::unpack_states_avx2;  // For CPUs without GFNI.
#endif
  eqquant::unpack(p, codes.get(), groups, levels.get());
  bool fine = true;
  for (int64_t group = 0; group < groups; group++)
    for (int64_t i = 0, state = 0; i < run; i++) {
      const int64_t code = code_with_history(codes.get() + group * bytes, run, bits, i);
      state = state >> bits | code << (eqquant::state_bits - bits);
      int index = 0;
      for (int bit = 0; bit < eqquant::LinearTable::most_masks; bit++)
        index |= __builtin_parity(static_cast<unsigned>(state & table.masks[bit])) << bit;
      fine &= levels[group * run + i] == table.levels[index];
    }
  std::normal_distribution<float> normal;
  std::unique_ptr<float[]> scales(new float[groups]), x(new float[p.m * p.packed]), y(new float[p.m * p.rows]);
  for (int64_t i = 0; i < groups; i++) scales[i] = 1 + below(100) / 100.0f;
  for (int64_t i = 0; i < p.m * p.packed; i++) x[i] = normal(generator);
  const float zeros[16] = {};
  std::atomic<bool> unusual = false;
  p.scales.inner = scales.get(), p.x = x.get(), p.y = y.get(), p.levels = zeros, p.unusual = &unusual;
  for (const eqquant::Kernel* k = eqquant::kernels; k->name; k++) {
    p.parts = k->parts;
    if (k->needs > best || (k->x_wt->why_not && k->x_wt->why_not(p))) continue;
    if (std::string(k->name).find("AMX") != std::string::npos) continue;  // For more rows.
    const auto scratch = scratch_of(*k->x_wt, p);
    k->x_wt->prepare(p, scratch.get(), 0, p.m);
    eqquant::run_units(*k->x_wt, p, scratch.get(), 0, p.rows);
    double error = 0, norm = 0;
    for (int64_t i = 0; i < p.m; i++)
      for (int64_t row = 0; row < p.rows; row++) {
        double sum = 0;
        // The norm of the terms, because most of the sum may cancel.
        for (int64_t j = 0; j < p.packed; j++) {
          const double term = double(x[i * p.packed + j]) * scales[row * p.blocks + j / run] *
                              static_cast<int8_t>(levels[row * p.packed + j]);
          sum += term, norm += term * term;
        }
        error += std::pow(sum - y[i * p.rows + row], 2);
      }
    const bool is_close = std::sqrt(error) <= tolerance_of(k->name) * std::sqrt(norm);
    if (!is_close) std::printf("states: %s: error %g\n", k->name, std::sqrt(error / norm));
    fine &= is_close;
  }
  if (!fine) std::printf("states: wrong; %d bits, blocks of %ld codes, instructions %d\n", bits, long(run), needs);
  return fine;
}

bool check_relayout() {
  using eqquant::Layout;
  using eqquant::Move;
  const int64_t from_bytes = 1 + below(150), to_bytes = 1 + below(150), blocks = 1 + below(70);
  std::unique_ptr<uint8_t[]> in(new uint8_t[blocks * from_bytes]), out(new uint8_t[blocks * to_bytes]),
      start(new uint8_t[to_bytes]);
  for (int64_t i = 0; i < blocks * from_bytes; i++) in[i] = static_cast<uint8_t>(below(256));
  for (int64_t i = 0; i < to_bytes; i++) start[i] = static_cast<uint8_t>(below(256));
  const int64_t num_moves = below(20);
  std::unique_ptr<Move[]> moves(new Move[num_moves]);
  for (int64_t i = 0; i < num_moves; i++) {
    int count = 1 << below(7);
    while (count > std::min(from_bytes, to_bytes)) count /= 2;
    moves[i] = Move{below(static_cast<int>(from_bytes) - count + 1), below(static_cast<int>(to_bytes) - count + 1),
                    count, below(15) - 7, below(256)};
    const int shift = moves[i].shift;
    moves[i].mask &= shift > 0 ? 255 << shift : 255 >> -shift;
  }
  const Layout layout{from_bytes, to_bytes, start.get(), moves.get(), num_moves};
  bool fine = eqquant::is_valid(layout);
  eqquant::relayout(layout, in.get(), blocks, out.get());
  for (int64_t block = 0; block < blocks; block++) {
    std::vector<uint8_t> expected(start.get(), start.get() + to_bytes);
    for (int64_t i = 0; i < num_moves; i++)
      for (int j = 0; j < moves[i].count; j++) {
        const int byte = in[block * from_bytes + moves[i].from + j], shift = moves[i].shift;
        const int shifted = shift > 0 ? byte << shift : byte >> -shift;
        expected[moves[i].to + j] ^= static_cast<uint8_t>(shifted & moves[i].mask);
      }
    fine &= !std::memcmp(expected.data(), out.get() + block * to_bytes, to_bytes);
  }
  for (int64_t i = 0; i < num_moves; i++) {  // Moves that leave the block.
    const Move move = moves[i];
    for (int32_t Move::* field : {&Move::from, &Move::to, &Move::count, &Move::shift, &Move::mask}) {
      moves[i].*field += 300;
      fine &= !eqquant::is_valid(layout);
      moves[i] = move;
    }
  }
  if (!fine) std::printf("relayout: wrong; from %ld to %ld\n", long(from_bytes), long(to_bytes));
  return fine;
}

// Checks that an order predicts what followed twice, and nothing else.
bool check_order() {
  eqquant::Order order;
  std::array<uint8_t, 3> codes{};
  const auto after = [&](int i) { return order.after({&codes[i], 1}).begin; };
  bool fine = true;
  for (int time = 0; time < 4; time++)
    for (int i = 0; i < 3; i++) fine &= after(i) == (time < 2 ? nullptr : &codes[(i + 1) % 3]);
  fine &= after(0) == &codes[1] && after(2) == &codes[0];
  // 2 followed 0 only once.
  fine &= after(0) == nullptr;
  if (!fine) std::printf("order: wrong\n");
  return fine;
}

// Checks that the last piece of a lane, and no other, is followed by the lane's part of what the next loop reads.
bool check_loop() {
  constexpr int64_t lanes = 2, pieces = 8, size = 3;
  std::array<uint8_t, 100> next{};
  using Seen = std::array<eqquant::Bytes, pieces>;
  Seen seen;
  eqquant::Loop loop(lanes);
  loop.call = [](const void* use, int64_t begin, int64_t, eqquant::Bytes after) {
    (*static_cast<Seen* const*>(use))->at(begin / size) = after;
  };
  Seen* const use = &seen;
  loop.use = &use, loop.count = pieces * size, loop.piece = size, loop.pieces = pieces;
  loop.ahead = {next.data(), next.size()};
  loop.work();
  bool fine = loop.is_done();
  for (int64_t i = 0; i < pieces; i++) {
    const uint8_t* const expected = i == 3 ? next.data() : i == 7 ? next.data() + 50 : nullptr;
    fine &= seen[i].begin == expected && seen[i].count == (expected ? 50 : 0);
  }
  if (!fine) std::printf("loop: wrong\n");
  return fine;
}

// Checks where codes are prefetched.
bool check_far() {
  std::vector<uint8_t> codes(3 * eqquant::far_ahead), next(eqquant::far_ahead);
  const uint8_t* const end = codes.data() + 2 * eqquant::far_ahead;
  Product p{};
  bool fine = p.far_from(codes.data()) == eqquant::far_ahead;
  p.own_end = end, p.to_next = next.data() - end;
  for (int64_t left : {2 * eqquant::far_ahead, eqquant::far_ahead + 1}) {
    const uint8_t* const from = end - left;
    fine &= from + p.far_from(from) == from + eqquant::far_ahead;
  }
  for (int64_t left : {eqquant::far_ahead, int64_t{64}}) {
    const uint8_t* const from = end - left;
    fine &= from + p.far_from(from) == next.data() + eqquant::far_ahead - left;
  }
  if (!fine) std::printf("far: wrong\n");
  return fine;
}

}  // namespace

int main(int argc, char** argv) {
  const int times = argc > 1 ? std::atoi(argv[1]) : 150;
  const int best = eqquant::instructions();
  std::printf("instructions: %d\n", best);
  int failed = 0, ran = 0;
  for (const eqquant::Kernel* k = eqquant::kernels; k->name; k++)
    for (const Routine* routine : {k->x_wt, k->x_w}) {
      if (!routine) continue;
      const std::string name(k->name);
      const bool integers = name.find("int8") != std::string::npos;
      const bool tiles = name.find("AMX") != std::string::npos;
      const bool exact = integers && k->parts == 2 && !tiles;
      const Case c{k->name,   routine,  routine == k->x_w,   k->parts, k->needs,
                   integers, exact,    !routine->why_not || (tiles && integers),
                   tolerance_of(k->name)};
      if (k->needs > best) {
        std::printf("NOT RUN, this CPU cannot: %s\n", c.name);
        continue;
      }
      for (int i = 0; i < times; i++, ran++) failed += !check(c);
    }
  std::printf("%d products, %d wrong\n", ran, failed);
  int wrong = 0;
  for (int i = 0; i < 2 * times && best; i++) wrong += !check_rounding();
  std::printf("%d arrays rounded, %d wrong\n", 2 * times, wrong);
  failed += wrong;
  wrong = 0;
  for (int i = 0; i < 2 * times && best; i++) wrong += !check_rotation();
  std::printf("%d arrays rotated, %d wrong\n", 2 * times, wrong);
  failed += wrong;
  wrong = 0;
  for (int i = 0; i < 2 * times; i++) wrong += !check_relayout();
  std::printf("%d layouts, %d wrong\n", 2 * times, wrong);
  failed += wrong;
  wrong = 0;
  for (int i = 0; i < 2 * times && best; i++) wrong += !check_states(best);
  std::printf("%d arrays with a history, %d wrong\n", 2 * times, wrong);
  failed += wrong;
  failed += !check_order() + !check_loop() + !check_far();
  return failed != 0;
}
