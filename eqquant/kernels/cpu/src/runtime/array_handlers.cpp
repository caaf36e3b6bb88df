// The handlers of functions that write arrays: they check operands and distribute the work.
#include <algorithm>
#include <cstdint>

#include "encode/hadamard.h"
#include "encode/searching.h"
#include "encode/transpose.h"
#include "runtime/handler.h"
#include "runtime/limits.h"
#include "runtime/machine.h"
#include "runtime/parallel.h"

namespace eqquant {
namespace {

// Rows of `size` values that one thread encodes or rounds at once.
int64_t rows_of_a_piece(int64_t size) {
  return std::max<int64_t>(1, limits::values_of_a_thread / 8 / std::max<int64_t>(size, 1));
}

ffi::Error encode(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                  ffi::Buffer<ffi::F32> boundaries, ffi::Buffer<ffi::F32> levels,
                  ffi::Buffer<ffi::F32> given, ffi::ResultBuffer<ffi::U8> codes,
                  ffi::ResultBuffer<ffi::F32> scales, ffi::ResultBuffer<ffi::PRED> problems,
                  int64_t block, bool is_given, ffi::Span<const float> shares) {
  Encoder* const run = instructions() ? encoder(instructions()) : nullptr;
  if (!run) return invalid("this CPU cannot encode");
  const auto of_x = x.dimensions();
  if (of_x.size() != 2) return invalid("x must have two axes");
  if (boundaries.element_count() != 16 || levels.element_count() != 16)
    return invalid("there must be 16 boundaries and 16 levels");
  if (block < 32 || block % 32 || of_x[1] % block)
    return invalid("block must be a multiple of 32, and divide the size of a row");
  const int64_t rows = of_x[0], size = of_x[1];
  if (int64_t(codes->element_count()) != rows * size / 2 ||
      int64_t(scales->element_count()) != rows * size / block ||
      int64_t(problems->element_count()) != rows)
    return invalid("shapes of results do not fit");
  if (is_given && given.element_count() != scales->element_count())
    return invalid("there must be a scale for each block");
  const Encoding e{x.typed_data(),
                   boundaries.typed_data(),
                   levels.typed_data(),
                   shares.begin(),
                   static_cast<int64_t>(shares.size()),
                   is_given ? given.typed_data() : nullptr,
                   codes->typed_data(),
                   scales->typed_data(),
                   problems->typed_data(),
                   rows,
                   size,
                   block};
  parallel_for(pool, rows, rows_of_a_piece(size), [&](int64_t begin, int64_t end) { run(e, begin, end); });
  return ffi::Error::Success();
}

ffi::Error round(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x,
                 ffi::Buffer<ffi::F32> boundaries, ffi::Buffer<ffi::F32> levels,
                 ffi::ResultBuffer<ffi::F32> y, ffi::ResultBuffer<ffi::PRED> problems,
                 int64_t kind, int64_t block, float largest_scale, bool by_deviation,
                 bool least_squares, int64_t best) {
  best = std::min<int64_t>(best, instructions());
  if (best < 1) return invalid("this CPU cannot round");
  const auto of_x = x.dimensions();
  if (of_x.size() != 2) return invalid("x must have two axes");
  const int64_t rows = of_x[0], size = of_x[1];
  if (kind < 0 || kind > 3) return invalid("kind must be 0 to 3");
  if (boundaries.element_count() != 15 || levels.element_count() != 16)
    return invalid("there must be 15 boundaries and 16 levels");
  if (block < 1 || size % block) return invalid("block must divide the size of a row");
  if (int64_t(y->element_count()) != rows * size || int64_t(problems->element_count()) != rows)
    return invalid("shapes of results do not fit");
  const Rounding r{x.typed_data(),
                   boundaries.typed_data(),
                   levels.typed_data(),
                   y->typed_data(),
                   problems->typed_data(),
                   size,
                   block,
                   static_cast<Levels>(kind),
                   largest_scale,
                   by_deviation,
                   least_squares};
  Rounder* const run = rounder(static_cast<int>(best));
  parallel_for(pool, rows, rows_of_a_piece(size), [&](int64_t begin, int64_t end) { run(r, begin, end); });
  return ffi::Error::Success();
}

ffi::Error round_int8(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::S8> codes,
                      ffi::ResultBuffer<ffi::F32> scales, int64_t best) {
  best = std::min<int64_t>(best, instructions());
  if (best < 1) return invalid("this CPU cannot round");
  const auto of_x = x.dimensions();
  if (of_x.size() != 2) return invalid("x must have two axes");
  const int64_t rows = of_x[0], size = of_x[1];
  if (codes->element_count() != x.element_count() || int64_t(scales->element_count()) != rows)
    return invalid("shapes of results do not fit");
  const Int8Rounding r{x.typed_data(), codes->typed_data(), scales->typed_data(), size};
  Int8Rounder* const run = int8_rounder(static_cast<int>(best));
  parallel_for(pool, rows, rows_of_a_piece(size), [&](int64_t begin, int64_t end) { run(r, begin, end); });
  return ffi::Error::Success();
}

ffi::Error transpose(ffi::ThreadPool pool, ffi::Buffer<ffi::S8> x, ffi::ResultBuffer<ffi::S8> y) {
  const auto of_x = x.dimensions(), of_y = y->dimensions();
  if (of_x.size() != 3 || of_y.size() != 3 || of_y[0] != of_x[0] || of_y[1] != of_x[2] ||
      of_y[2] != of_x[1])
    return invalid("x must have three axes, and y must have the last two of them swapped");
  const int64_t rows = of_x[1], columns = of_x[2], size = rows * columns;
  const auto* from = reinterpret_cast<const uint8_t*>(x.typed_data());
  auto* to = reinterpret_cast<uint8_t*>(y->typed_data());
  for (int64_t i = 0; i < of_x[0]; i++) {
    const auto work = [&](int64_t begin, int64_t end) {
      transpose_bytes(from + i * size, to + i * size, rows, columns, begin, end);
    };
    if (size < limits::values_of_a_thread) work(0, columns);
    else parallel_for(pool, columns, transpose_tile, work);
  }
  return ffi::Error::Success();
}

ffi::Error search(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::Buffer<ffi::F32> scales,
                  ffi::Buffer<ffi::F32> factor, ffi::Buffer<ffi::F32> levels,
                  ffi::ResultBuffer<ffi::F32> values, ffi::ResultBuffer<ffi::F32> errors,
                  ffi::ResultBuffer<ffi::U8> codes, int64_t bits, int64_t count) {
  Searcher* const run = instructions() ? searcher(instructions()) : nullptr;
  if (!run) return invalid("this CPU cannot search");
  const auto of_x = x.dimensions(), of_factor = factor.dimensions();
  if (of_x.size() != 2) return invalid("x must have two axes");
  if (values->element_count() != x.element_count() || errors->element_count() != x.element_count() ||
      codes->element_count() != x.element_count())
    return invalid("shapes of results do not fit");
  const int64_t rows = of_x[0], size = of_x[1], states = levels.element_count();
  if (int64_t(scales.element_count()) != rows) return invalid("there must be a scale for each row");
  if (of_factor.size() != 2 || of_factor[0] != size || of_factor[1] != size)
    return invalid("factor must have a row and a column for each value of a row");
  if (bits < 1 || bits > 4 || count < 1 || count > 1024)
    return invalid("bits must be from 1 to 4, and count from 1 to 1024");
  int64_t power = int64_t(1) << bits;
  while (power < states) power <<= bits;
  if (power != states || states > 1 << 16) return invalid("there must be a level for each state");
  const Searching s{x.typed_data(),
                    scales.typed_data(),
                    factor.typed_data(),
                    levels.typed_data(),
                    states,
                    static_cast<int>(bits),
                    count,
                    values->typed_data(),
                    errors->typed_data(),
                    codes->typed_data(),
                    rows,
                    size};
  if (size)
    parallel_for(pool, rows, 1, [&](int64_t begin, int64_t end) { run(s, begin, end); });
  return ffi::Error::Success();
}

ffi::Error rotate(ffi::ThreadPool pool, ffi::Buffer<ffi::F32> x, ffi::ResultBuffer<ffi::F32> y, int64_t block) {
  if (!instructions()) return invalid("this CPU cannot rotate");
  const auto of_x = x.dimensions();
  if (of_x.size() != 2 || !x.element_count() || x.element_count() != y->element_count())
    return invalid("x and y must have two axes, and the same size");
  const int64_t rows = of_x[0], size = of_x[1];
  if (block < 1 || block & (block - 1) || size % block)
    return invalid("block must be a power of two that divides the size of a row");
  const auto work = [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) hadamard(x.typed_data() + i * size, y->typed_data() + i * size, size, block);
  };
  if (rows * size < limits::values_of_a_thread)
    work(0, rows);
  else
    parallel_for(pool, rows, 1 + limits::values_of_a_thread / 8 / size, work);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace eqquant

EQQUANT_EXPORT XLA_FFI_Error* eqquant_encode(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_encode, eqquant::encode,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::PRED>>()
                                  .Attr<int64_t>("block")
                                  .Attr<bool>("is_given")
                                  .Attr<ffi::Span<const float>>("shares"));

EQQUANT_EXPORT XLA_FFI_Error* eqquant_round(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_round, eqquant::round,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::PRED>>()
                                  .Attr<int64_t>("kind")
                                  .Attr<int64_t>("block")
                                  .Attr<float>("largest_scale")
                                  .Attr<bool>("by_deviation")
                                  .Attr<bool>("least_squares")
                                  .Attr<int64_t>("instructions"));

EQQUANT_EXPORT XLA_FFI_Error* eqquant_round_int8(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_round_int8, eqquant::round_int8,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::S8>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("instructions"));

EQQUANT_EXPORT XLA_FFI_Error* eqquant_transpose(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_transpose, eqquant::transpose,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::S8>>()
                                  .Ret<ffi::Buffer<ffi::S8>>());

EQQUANT_EXPORT XLA_FFI_Error* eqquant_search(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_search, eqquant::search,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::U8>>()
                                  .Attr<int64_t>("bits")
                                  .Attr<int64_t>("count"));

EQQUANT_EXPORT XLA_FFI_Error* eqquant_rotate(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_rotate, eqquant::rotate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("block"));
