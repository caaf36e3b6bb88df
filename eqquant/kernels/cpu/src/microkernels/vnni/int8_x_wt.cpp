#define EQQUANT_TARGET_VNNI
#include "microkernels/vnni/int8_blocks.h"
#include "microkernels/vnni/int8_few_rows.h"
#include "microkernels/vnni/int8_states.h"
#include "products/int8_x_wt.h"
#include "runtime/machine.h"

EQQUANT_BEGIN
namespace {

// True if codes with a history are decoded in registers.
bool decodes_states(const Product& p) { return has_bit_matrices() && serves_states(p); }

void prepare_any(const Product& p, char* scratch, int64_t begin, int64_t end) {
  if (decodes_states(p)) return prepare_states(p, scratch, begin, end);
  const auto some = few_rows::serves(p) ? few_rows::prepare : by_blocks::serves(p) ? by_blocks::prepare : prepare;
  some(p, scratch, begin, end);
}
void run_any(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  if (decodes_states(p)) return run_states(p, scratch, begin, end);
  const auto some = few_rows::serves(p) ? few_rows::run : by_blocks::serves(p) ? by_blocks::run : run;
  some(p, scratch, begin, end);
}
bool reads_stored(const Product& p) { return decodes_states(p) || few_rows::reads_stored(p); }
// An upper bound for all levels, which are not known yet.
int64_t scratch_of_any(const Product& p) {
  return std::max({few_rows::scratch_size(p), by_blocks::scratch_size(p), p.has_history ? scratch_of_states(p) : 0});
}
bool adds_offsets(const Product& p) { return few_rows::serves(p) && RowOffsets::serve(p); }
const char* why_not_any(const Product& p) {
  return decodes_states(p) || few_rows::serves(p) || by_blocks::serves(p) ? nullptr : why_not(p);
}
int64_t grain(const Product& p) {
  return decodes_states(p) || few_rows::serves(p) ? rows_of_tile : int8_x_wt_routine.grain(p);
}

}  // namespace
EQQUANT_END

namespace eqquant {
extern const Routine int8_x_wt_vnni = {vnni::prepare_any, vnni::run_any,     vnni::scratch_of_any,
                                       vnni::grain,       vnni::why_not_any, vnni::reads_stored,
                                       vnni::adds_offsets};
}  // namespace eqquant
