// The handler of rotations.
#include <string>

#include "encode/hadamard.h"
#include "runtime/limits.h"
#include "runtime/machine.h"
#include "runtime/parallel.h"

namespace ffi = xla::ffi;

namespace eqquant {
namespace {

ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("eqquant: " + what); }

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

extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* eqquant_rotate(XLA_FFI_CallFrame*);
XLA_FFI_DEFINE_HANDLER_SYMBOL(eqquant_rotate, eqquant::rotate,
                              ffi::Ffi::Bind()
                                  .Ctx<ffi::ThreadPool>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Ret<ffi::Buffer<ffi::F32>>()
                                  .Attr<int64_t>("block"));
