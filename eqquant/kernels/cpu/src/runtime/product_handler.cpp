// The handler of products, which checks operands and distributes the work, and what Python reads from the library.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <iterator>
#include <string>
#include <string_view>
#include <vector>

#include "decode/states.h"
#include "decode/unpack.h"
#include "runtime/handler.h"
#include "runtime/huge_pages.h"
#include "runtime/limits.h"
#include "runtime/machine.h"
#include "runtime/parallel.h"
#include "runtime/range.h"

namespace eqquant {
namespace {

const Kernel* find(std::string_view name) {
  for (const Kernel* kernel = kernels; kernel->name; kernel++)
    if (kernel->name == name) return kernel;
  return nullptr;
}

// Sets the fields that describe rows of `bytes` bytes and `p.blocks` blocks.
void set_codes(Product& p, int64_t bits, int64_t bytes, bool has_history) {
  p.stored_bits = static_cast<int>(bits);
  p.has_history = has_history;
  const bool is_short = bits == 2 && bytes == 4 * p.blocks;  // Blocks of 16 codes.
  p.bits = bits == 3 || is_short ? 4 : bits == 5 || bits == 6 ? 8 : p.stored_bits;
  if (has_history) p.bits = 8;
  p.packed = bytes * p.bits / p.stored_bits;
}

// The element type of scales of a type.
ffi::DataType element_of(ScaleType type) {
  switch (type) {
    case ScaleType::float32: return ffi::F32;
    case ScaleType::bfloat16: return ffi::BF16;
    case ScaleType::float16: return ffi::F16;
    case ScaleType::int8: return ffi::S8;
    default: return ffi::U8;
  }
}

template <class Dimensions>
int64_t product_of(const Dimensions& dimensions, size_t count) {
  int64_t out = 1;
  for (size_t i = 0; i < count; i++) out *= dimensions[i];
  return out;
}

// Some numbers as one attribute, because decoding an attribute takes 10 to 20 ns.
using Integers = ffi::Span<const int64_t>;

// Sets stored numbers, and returns a reason against them, or null.
const char* set_scales(Scales& s, const ffi::AnyBuffer& inner, const ffi::AnyBuffer& outer, Integers types,
                       int64_t rows, int64_t blocks) {
  if (types.size() != 3) return "scales must have a type, an outer type and outer blocks";
  const int64_t type = types[0], outer_type = types[1], outer_blocks = types[2];
  constexpr int64_t last = static_cast<int64_t>(ScaleType::float8);
  if (type < 0 || type > last || outer_type < 0 || outer_type > last)
    return "types of scales must be numbers of ScaleType";
  s.type = static_cast<ScaleType>(type);
  s.outer_type = static_cast<ScaleType>(outer_type);
  s.outer_blocks = outer_blocks;
  s.inner = inner.untyped_data();
  s.outer = outer_blocks ? outer.untyped_data() : nullptr;
  if (inner.element_type() != element_of(s.type) || outer.element_type() != element_of(s.outer_type))
    return "scales must have the elements of their type";
  if (int64_t(inner.element_count()) != rows * blocks) return "there must be a scale for each block";
  if (outer_blocks < 0 || (outer_blocks && int64_t(outer.element_count()) != rows * s.outer_count(blocks)))
    return "there must be an outer scale for each `outer_blocks` blocks";
  return nullptr;
}

int64_t in_lines(int64_t bytes) { return (bytes + 63) / 64 * 64; }

// The multiplications of a product, including what decoding costs.
int64_t multiplications(const Product& p) { return (p.m + limits::rows_of_decoding) * p.rows * p.columns(); }
int64_t units_of(const Product& p) { return p.contract_rows ? p.packed : p.rows; }

// True if each thread computes whole products of a batch, because threads cannot share one, or it is too small.
bool splits_batch(const Routine& routine, const Product& p, int64_t batch) {
  const int64_t each = multiplications(p);
  if (batch < 2 || batch * each < 2 * limits::work_of_a_thread) return false;
  return each < limits::work_of_a_thread || units_of(p) <= routine.grain(p);
}

// Bytes of scratch of each product of a batch.
int64_t scratch_of(const Routine& routine, const Product& p, int needs, bool has_offsets) {
  const int64_t bytes = in_lines(routine.scratch(p));
  return has_offsets ? bytes + in_lines(offsets_routine(needs).scratch(p)) : bytes;
}

// The position of each matrix of a product in an operand. With an index, the operand is a stack: the
// first axes of the product are the axes of the index, whose elements are positions in the first axis of the
// stacks. The other batch axes are the next axes of the stacks.
class Matrices {
 public:
  explicit Matrices(ffi::RemainingArgs rest, bool uses_index = true) {
    if (!rest.size() || !uses_index) return;
    const auto found = rest.get<ffi::Buffer<ffi::S32>>(0);
    has_index_ = true, is_valid_ = rest.size() == 1 && found.has_value();
    if (!is_valid_) return;
    index_ = found->typed_data();
    axes_.assign(found->dimensions().begin(), found->dimensions().end());
  }

  // Returns whether the operand, which has these axes, has a matrix for each product of x.
  template <class Dimensions>
  bool fits(const Dimensions& of_operand, const Dimensions& of_x) {
    if (!has_index_) return of_operand.size() == of_x.size() && same(of_operand, of_x, 0, 0);
    const size_t first = axes_.size();
    if (!is_valid_ || of_x.size() < first + 2 || of_operand.size() != of_x.size() - first + 1)
      return false;
    for (size_t i = 0; i < first; i++)
      if (axes_[i] != of_x[i]) return false;
    stack_ = of_operand[0], others_ = 1;
    for (size_t i = 1; i + 2 < of_operand.size(); i++) others_ *= of_operand[i];
    return stack_ > 0 && same(of_operand, of_x, 1, first);
  }

  // Returns the number of matrices of the operand, for a product of a batch.
  int64_t count(int64_t batch) const { return has_index_ ? stack_ * others_ : batch; }

  int64_t position(int64_t i) const {
    if (!has_index_) return i;
    const int64_t entry = std::clamp<int64_t>(index_[i / others_], 0, stack_ - 1);
    return entry * others_ + i % others_;
  }

 private:
  template <class Dimensions>
  static bool same(const Dimensions& a, const Dimensions& b, size_t i, size_t j) {
    for (; i + 2 < a.size(); i++, j++)
      if (a[i] != b[j]) return false;
    return true;
  }

  bool has_index_ = false, is_valid_ = true;
  const int32_t* index_ = nullptr;
  std::vector<int64_t> axes_;
  int64_t stack_ = 0, others_ = 1;
};

ffi::Error dot(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer codes,
               ffi::AnyBuffer scales, ffi::AnyBuffer outer_scales, ffi::AnyBuffer offsets,
               ffi::AnyBuffer outer_offsets, ffi::Buffer<ffi::F32> levels,
               ffi::RemainingArgs rest, ffi::ResultBuffer<ffi::F32> y,
               ffi::ResultBuffer<ffi::U8> scratch, std::string_view kernel, Integers code_layout,
               Integers scale_types, Integers offset_types, float shift, bool rounds_x, float level_unit,
               bool contract_rows, bool own_scales) {
  const Kernel* found = find(kernel);
  if (!found) return invalid("there is no kernel '" + std::string(kernel) + "'");
  if (found->needs > instructions())
    return invalid("this CPU cannot run '" + std::string(kernel) + "'");
  const Routine* routine = contract_rows ? found->x_w : found->x_wt;
  if (!routine) return invalid("'" + std::string(kernel) + "' does not contract rows");
  if (code_layout.size() != 3) return invalid("code_layout must be bits, exponent and run");
  const int64_t bits = code_layout[0], exponent = code_layout[1], run = code_layout[2];
  if (bits < 1 || bits > 8 || bits == 7) return invalid("bits must be 1 to 6, or 8");
  if (exponent && (bits != 8 || exponent < 4 || exponent > 5))
    return invalid("floats must have 8 bits, 4 or 5 of them of exponent");
  const bool has_history = levels.element_count() == LinearTable::numbers;
  if (levels.element_count() != 16 && !has_history) return invalid("there must be 16 levels, or a linear table");
  if (has_history && (bits < 2 || bits > 4)) return invalid("codes with a history must have 2 to 4 bits");

  const auto of_x = x.dimensions(), of_codes = codes.dimensions(), of_scales = scales.dimensions(),
             of_y = y->dimensions();
  const size_t rank = of_x.size();
  if (rank < 2 || of_codes.size() < 2 || of_scales.size() < 2 || of_y.size() != rank)
    return invalid("operands must have the same number of axes, two or more");
  if (codes.element_type() != (bits == 8 && !exponent ? ffi::S8 : ffi::U8))
    return invalid("codes must be int8 if they are integers of 8 bits, and otherwise uint8");
  if (x.element_type() != ffi::F32 && x.element_type() != ffi::BF16)
    return invalid("x must be float32 or bfloat16");
  const size_t last = rank - 1, second = rank - 2;
  const int64_t batch = product_of(of_x, second);
  Matrices code_matrices(rest), scale_matrices(rest, !own_scales);
  if (!code_matrices.fits(of_codes, of_x) || !scale_matrices.fits(of_scales, of_x) ||
      !std::equal(of_x.begin(), of_x.end() - 2, of_y.begin()))
    return invalid("operands must have the same number of axes, and the same batch axes");

  Product p{};
  p.m = of_x[second];
  p.rows = of_codes[of_codes.size() - 2];
  p.blocks = of_scales[of_scales.size() - 1];
  p.run = run;
  p.exponent = static_cast<int>(exponent);
  const int64_t stored = of_codes[of_codes.size() - 1];
  set_codes(p, bits, stored, has_history);
  if (p.stored_bytes() != stored) return invalid("codes must fill their bytes");
  p.bfloat16_x = x.element_type() == ffi::BF16;
  const int64_t all_rows = scale_matrices.count(batch) * p.rows;
  const char* problem = set_scales(p.scales, scales, outer_scales, scale_types, all_rows, p.blocks);
  const bool has_offsets = offset_types.size();
  if (!problem && has_offsets)
    problem = set_scales(p.offsets, offsets, outer_offsets, offset_types, all_rows, p.blocks);
  if (problem) return invalid(problem);
  p.shift = shift;
  p.rounds_x = rounds_x;
  p.contract_rows = contract_rows;
  p.levels = levels.typed_data();
  LinearTable table;
  if (has_history) {
    table = LinearTable(p.levels);
    p.linear_table = &table;
    p.unpack_states = states_unpacker(found->needs);
  }
  p.parts = found->parts;
  p.level_unit = level_unit;
  const int64_t in = p.contracted();
  const int64_t out = contract_rows ? p.columns() : p.rows;
  if (of_x[last] != in || of_scales[of_scales.size() - 2] != p.rows || of_y[second] != p.m || of_y[last] != out)
    return invalid("shapes of operands do not fit");
  if (!x.element_count() || !codes.element_count() || !batch)
    return invalid("operands must not be empty");
  if (run < 1 || p.packed % run || (bits == 3 && run % 4) || (p.bits > bits && bits > 3 && run % 8))
    return invalid("run must divide the bytes of a row");
  if (has_history && (run % 8 || p.blocks * run != p.packed)) return invalid("run must be a block");
  if (!p.blocks || p.packed % p.blocks) return invalid("blocks must divide the bytes of a row");
  if (routine->why_not)
    if (const char* reason = routine->why_not(p)) return invalid(reason);
  const int64_t bytes = scratch_of(*routine, p, found->needs, has_offsets);
  const bool splits = splits_batch(*routine, p, batch);
  if (static_cast<int64_t>(scratch->element_count()) < bytes * (splits ? batch : 1))
    return invalid("scratch is too small");

  ask_for_huge_pages(y->untyped_data(), y->size_bytes());
  ask_for_huge_pages(scratch->untyped_data(), scratch->size_bytes());
  const auto* all_codes = static_cast<const uint8_t*>(codes.untyped_data());
  const auto* all_x = static_cast<const char*>(x.untyped_data());
  const Routine& of_offsets = offsets_routine(found->needs);
  const bool routine_adds_offsets = has_offsets && routine->adds_offsets && routine->adds_offsets(p);
  const int64_t units = units_of(p);
  int64_t grain = routine->grain(p);
  // In x @ w, each thread processes a part of every row. With few rows of the activation, reading these parts
  // dominates, and long parts are faster.
  if (contract_rows && p.m < limits::rows_of_long_parts)
    grain *= std::max<int64_t>(
        1, std::min(limits::long_part, units / std::max<int64_t>(1, pool.num_threads())) / grain);
  const bool alone = splits || multiplications(p) < limits::work_of_a_thread;
  const auto run_one = [&](int64_t i) {
    Product q = p;
    char* const space = reinterpret_cast<char*>(scratch->typed_data()) + (splits ? i * bytes : 0);
    char* const sums = space + in_lines(routine->scratch(q));
    q.x = all_x + i * q.m * in * q.x_size();
    // Rows of all matrices before this one.
    const int64_t codes_before = code_matrices.position(i) * q.rows;
    const int64_t scales_before = scale_matrices.position(i) * q.rows;
    q.codes = all_codes + codes_before * q.stored_bytes();
    q.scales = p.scales.from(scales_before, q.blocks);
    if (has_offsets) q.offsets = p.offsets.from(scales_before, q.blocks);
    q.y = y->typed_data() + i * q.m * out;
    std::atomic<bool> unusual = false;
    q.unusual = &unusual;
    if (routine_adds_offsets) q.block_sums = reinterpret_cast<const float*>(sums);
    const auto prepare = [&](int64_t begin, int64_t end) {
      routine->prepare(q, space, begin, end);
      if (has_offsets) of_offsets.prepare(q, sums, begin, end);
    };
    const auto add_offsets = [&](int64_t begin, int64_t end) {
      if (has_offsets) of_offsets.run(q, sums, begin, end);
    };
    const auto multiply = [&](int64_t begin, int64_t end, Bytes after) {
      Product own = q;
      if (!contract_rows && after.count) own.own_end = q.stored(end), own.to_next = after.begin - q.stored(end);
      run_units(*routine, own, space, begin, end);
      finish_results(q, begin, end);
      if (!routine_adds_offsets) add_offsets(begin, end);
    };
    if (alone) {
      prepare(0, q.m);
      multiply(0, units, {});
    } else {
      parallel_for(pool, q.m, 16, prepare);
      // In x @ w, threads read parts of all rows.
      const Bytes ahead = contract_rows ? Bytes{} : order().after({q.codes, q.rows * q.stored_bytes()});
      parallel_for(pool, units, grain, multiply, ahead);
    }
    if (!may_be_out_of_range(q)) return;
    const InRange again(q);
    if (!again.is_needed()) return;
    again.run(*routine);
    add_offsets(0, units);
  };
  const auto run_some = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) run_one(i);
  };
  if (splits)
    parallel_for(pool, batch, 1 + limits::work_of_a_thread / multiplications(p), run_some);
  else
    run_some(0, batch);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace eqquant

EQQUANT_EXPORT XLA_FFI_Error* eqquant_dot(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_dot, eqquant::dot,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .RemainingArgs()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Attr<std::string_view>("kernel")
                                  .Attr<eqquant::Integers>("code_layout")
                                  .Attr<eqquant::Integers>("scale_types")
                                  .Attr<eqquant::Integers>("offset_types")
                                  .Attr<float>("shift")
                                  .Attr<bool>("rounds_x")
                                  .Attr<float>("level_unit")
                                  .Attr<bool>("contract_rows")
                                  .Attr<bool>("own_scales"));

// See instructions() in machine.h.
EQQUANT_EXPORT int eqquant_instructions() { return eqquant::instructions(); }

// See has_bfloat16() in machine.h.
EQQUANT_EXPORT int eqquant_bfloat16() { return eqquant::has_bfloat16(); }

// Returns the scratch bytes of a batch of products; -1 if the kernel does not exist.
EQQUANT_EXPORT int64_t eqquant_scratch(const char* kernel, int contract_rows, int bfloat16_x,
                                       int64_t batch, int64_t m, int64_t rows, int64_t packed,
                                       int64_t blocks, int64_t run, int bits, int rounds_x,
                                       int has_offsets, int has_history) {
  const eqquant::Kernel* found = eqquant::find(kernel);
  const eqquant::Routine* routine =
      !found ? nullptr : contract_rows ? found->x_w : found->x_wt;
  if (!routine) return -1;
  eqquant::Product p{};
  p.m = m, p.rows = rows, p.blocks = blocks, p.run = run;
  eqquant::set_codes(p, bits, packed, has_history);
  p.contract_rows = contract_rows, p.bfloat16_x = bfloat16_x, p.rounds_x = rounds_x;
  p.parts = found->parts;
  const int64_t bytes = eqquant::scratch_of(*routine, p, found->needs, has_offsets);
  return bytes * (eqquant::splits_batch(*routine, p, batch) ? batch : 1);
}

// The XLA interface of this build. XLA supports older interfaces, but not newer ones.
EQQUANT_EXPORT int eqquant_interface() { return XLA_FFI_API_MAJOR * 1000 + XLA_FFI_API_MINOR; }

// The hash of the sources of this build.
EQQUANT_EXPORT const char* eqquant_sources() { return EQQUANT_SOURCES; }

// The other inputs of the build. A new build compares them to decide whether the library is current.
EQQUANT_EXPORT const char* eqquant_recipe() { return EQQUANT_RECIPE; }
