// What all handlers share. XLA calls a handler for each call of a function.
#pragma once

#include <string>

#include "xla/ffi/api/ffi.h"

#define EQQUANT_EXPORT extern "C" __attribute__((visibility("default")))

namespace ffi = xla::ffi;

namespace eqquant {

inline ffi::Error invalid(const std::string& what) { return ffi::Error::InvalidArgument("eqquant: " + what); }

}  // namespace eqquant
