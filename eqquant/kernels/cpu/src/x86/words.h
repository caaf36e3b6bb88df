// Integers of 16 bits that activations and levels become, and sums of their products: AVX-512
// VNNI. Included into a namespace, and under a target.

constexpr int largest_word = 32767, largest_level = 16383;

// Levels as integers, twice, as a lookup reads five bits; what one of them is; and the
// largest of them.
struct Levels {
  alignas(64) int16_t words[32];
  float unit;
  int largest;
};

// The largest magnitude of the levels.
float largest_of_levels(const Product& p) {
  if (p.bits == 8) return 128;
  float most = 0;
  for (int i = 0; i < 16; i++) most = std::max(most, std::fabs(p.levels[i]));
  return most;
}

Levels levels_of(const Product& p) {
  if (p.bits == 8) return {{}, 1, 128};
  const float most = largest_of_levels(p);
  Levels out{{}, p.level_unit > 0 ? p.level_unit : most / largest_level, 1};
  if (!(out.unit > 0) || !std::isfinite(1 / out.unit)) return out;  // They are all zero.
  for (int i = 0; i < 32; i++) {
    out.words[i] = static_cast<int16_t>(std::lrint(p.levels[i % 16] / out.unit));
    out.largest = std::max(out.largest, std::abs(out.words[i]));
  }
  return out;
}

// Of two lanes that are multiplied and added up, no sum is larger than the product of their
// norms, by Cauchy and Schwarz. This is what both may be, if they may be as large.
constexpr float largest_norm = 46340;  // Its square fits.

// By what words of such a norm are multiplied, so that it is at most `most` after they have
// been rounded again.
float shrunk(float norm, float most) { return norm > most ? (most - 4) / norm * (1 - 1e-6f) : 1; }

// Makes words of a row of the activation, of whose lanes the norm may be `most`: `round` makes
// them of the row times a number, `norm` says the largest norm. Returns their unit.
template <class Round, class Norm>
float round_to_words(float absmax, float most, const Round& round, const Norm& norm) {
  float per_unit = largest_word / absmax;
  if (!std::isfinite(per_unit)) per_unit = 0;
  round(per_unit);
  const float smaller = shrunk(norm(), most);
  if (smaller < 1) round(per_unit *= smaller);
  return !std::isfinite(absmax) ? NAN : per_unit > 0 ? 1 / per_unit : 0;
}

// Of a row of the activation, by the kernel.
int64_t row_words(const Product& p);

// Scratch is the words of all rows, and then the unit of each.
int16_t* words_in(char* scratch) { return reinterpret_cast<int16_t*>(scratch); }
float* units_in(const Product& p, char* scratch) {
  return reinterpret_cast<float*>(words_in(scratch) + p.m * row_words(p));
}
int64_t scratch_size(const Product& p) {
  return p.m * (row_words(p) * static_cast<int64_t>(sizeof(int16_t)) + sizeof(float));
}

// `_mm512_dpwssd_epi32`, of which GCC 12 keeps the sums in memory.
EQQUANT_INLINE __m512i add_products(__m512i sum, __m512i weight, __m512i x) {
  asm("vpdpwssd %2, %1, %0" : "+v"(sum) : "v"(weight), "v"(x));
  return sum;
}
