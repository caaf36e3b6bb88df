// The handler of the search for codes.
#include <string>

#include "encode/searching.h"
#include "runtime/machine.h"
#include "runtime/parallel.h"

namespace ffi = xla::ffi;

namespace eqquant {
namespace {

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("eqquant: " + what); }

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

}  // namespace
}  // namespace eqquant

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* eqquant_search(XLA_FFI_CallFrame*);
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
