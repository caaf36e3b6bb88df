// int8 x @ w.T for few rows and codes with a history, for CPUs with byte lookups and matrices of bits.
#pragma once

#include <cstdint>

#include "runtime/product.h"

namespace eqquant {

bool serves_states(const Product& p);
int64_t scratch_of_states(const Product& p);
void prepare_states(const Product& p, char* scratch, int64_t begin, int64_t end);
void run_states(const Product& p, const char* scratch, int64_t begin, int64_t end);

}  // namespace eqquant
