#define EQQUANT_TARGET_VNNI
#include "microkernels/vnni/int8_few_rows.h"
#include "products/int8_x_wt.h"

EQQUANT_BEGIN
namespace {

void prepare_any(const Product& p, char* scratch, int64_t begin, int64_t end) {
  few_rows::serves(p) ? few_rows::prepare(p, scratch, begin, end) : prepare(p, scratch, begin, end);
}
void run_any(const Product& p, const char* scratch, int64_t begin, int64_t end) {
  few_rows::serves(p) ? few_rows::run(p, scratch, begin, end) : run(p, scratch, begin, end);
}
// An upper bound for all levels, which are not known yet.
int64_t scratch_of_any(const Product& p) { return std::max(few_rows::scratch_size(p), scratch_size(p)); }
bool adds_offsets(const Product& p) { return few_rows::serves(p) && RowOffsets::serve(p); }
const char* why_not_any(const Product& p) { return few_rows::serves(p) ? nullptr : why_not(p); }
int64_t grain(const Product& p) { return few_rows::serves(p) ? 4 : int8_x_wt_routine.grain(p); }

}  // namespace
EQQUANT_END

namespace eqquant {
extern const Routine int8_x_wt_vnni = {vnni::prepare_any, vnni::run_any,     vnni::scratch_of_any,
                                       vnni::grain,       vnni::why_not_any, vnni::few_rows::reads_stored,
                                       vnni::adds_offsets};
}  // namespace eqquant
