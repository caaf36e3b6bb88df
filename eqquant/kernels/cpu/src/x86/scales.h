// Scales of up to sixteen blocks that follow each other in a row. Included into a namespace, after
// absmax.h, and under a target with AVX-512.

EQQUANT_INLINE __m512 scales_at(const Product& p, int64_t row, int64_t b, __mmask16 some) {
  const int64_t at = row * p.blocks + b;
  if (!p.bfloat16_scales)
    return _mm512_maskz_loadu_ps(some, static_cast<const float*>(p.scales) + at);
  const __m256i narrow =
      _mm256_maskz_loadu_epi16(some, static_cast<const uint16_t*>(p.scales) + at);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}

// The larger magnitudes. NaN is the largest: see absmax.h.
EQQUANT_INLINE __m512 larger(__m512 most, __m512 x) {
  const __m512i magnitude = _mm512_and_si512(_mm512_castps_si512(x), _mm512_set1_epi32(0x7FFFFFFF));
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(most), magnitude));
}
