// x @ w.T in float32 for more rows of the activation, for any `Vector`. A tile of the
// weight is decoded once, into the innermost cache, and multiplied with all of them.

// Rows of the weight that are multiplied at once; how many times as many are decoded at
// once, so that what is read of the activation serves them all; of about how many values.
constexpr int at_once = 4, quads = 2, tile_values = 384;
// The activation that a second-level cache holds, beside the rest: more is taken in turns.
constexpr int64_t cached_bytes = 1 << 19;

template <int bits, Scaling scaling>
struct Tiles {
  static constexpr int64_t size = Vector::size, planes = 8 / bits;
  // Of a tile: (row / 4, step, plane, row % 4, value).
  static constexpr int64_t plane_stride = at_once * size, step_stride = planes * plane_stride;
  static constexpr int64_t most_steps = std::max<int64_t>(1, tile_values / (planes * size));
  static constexpr int64_t quad_stride = most_steps * step_stride;

  const Product& p;
  const Groups groups;
  const int64_t block = p.block_bytes(), block_steps = steps_of_block(p);
  const int64_t steps = p.blocks * block_steps, stride = row_stride(p);
  alignas(64) float tile[quads * quad_stride];

  using Codes = typename Decoder<bits>::Codes;
  template <int plane = 0>
  static EQQUANT_INLINE void write(const BlockDecoder<bits, scaling>& decoder, Codes codes,
                                   float* to) {
    Vector::store(to + plane * plane_stride, decoder.template decode<plane>(codes));
    if constexpr (plane + 1 < planes) write<plane + 1>(decoder, codes, to);
  }

  // `count` steps of four rows, from byte `from` of each on, which is step `v` of block `b`.
  void decode(int64_t row, int rows, const float* scales, int64_t b, int64_t v, int64_t from,
              int64_t next, int64_t count, float* to) const {
    const Vector::Levels levels = Vector::levels(p.levels);
    const int64_t whole = block / size, rest = block % size;
    const uint8_t* codes[at_once];
    const float* of_row[at_once];
    for (int r = 0; r < at_once; r++) {
      // Beyond the last row, that once more: it is not used.
      const int64_t used = std::min(r, rows - 1);
      codes[r] = p.codes + (row + used) * p.packed;
      of_row[r] = scales + used * p.blocks;
    }
    for (; count > 0; b++, v = 0) {
      BlockDecoder<bits, scaling> decoders[at_once];
      for (int r = 0; r < at_once; r++) decoders[r].begin(levels, of_row[r] + b);
      const int64_t some = std::min(count, whole - v), end = from + some * size;
      for (; from < end; from += size, to += step_stride) {
        if (from % 64 == 0)
          for (int r = 0; r < at_once; r++) __builtin_prefetch(codes[r] + from + next);
        for (int r = 0; r < at_once; r++)
          write(decoders[r], Decoder<bits>::read(Vector::bytes(codes[r] + from)), to + r * size);
      }
      count -= some;
      if (rest && count > 0) {
        for (int r = 0; r < at_once; r++) {
          const __m128i last = Vector::bytes(codes[r] + from, static_cast<int>(rest));
          write(decoders[r], Decoder<bits>::read(last), to + r * size);
        }
        from += rest, count--, to += step_stride;
      }
    }
  }

  // Four rows of a tile, `vectors` of each, with `count` rows of the activation. Sums are
  // (row of the activation, row % 4, value); those of the last of a row go to the result.
  struct Out {
    float* y;
    const float* scales;
    int rows;
  };
  template <int count>
  static void multiply(const Product& p, const float* w, const float* x, int64_t vectors,
                       float* sums, bool first, bool last, Out out) {
    using Floats = Vector::Floats;
    Floats sum[at_once][count];
    for (int r = 0; r < at_once; r++)
      for (int i = 0; i < count; i++)
        sum[r][i] = first ? Vector::zero() : Vector::load(sums + (i * at_once + r) * size);
    for (int64_t v = 0; v < vectors; v++, w += at_once * size, x += count * size) {
      Floats some[count];
      for (int i = 0; i < count; i++) some[i] = Vector::load(x + i * size);
      for (int r = 0; r < at_once; r++) {
        const Floats weight = Vector::load(w + r * size);
        for (int i = 0; i < count; i++)
          sum[r][i] = Vector::multiply_add(weight, some[i], sum[r][i]);
      }
    }
    if (last) {
      const __m128 scales = scaling == Scaling::row ? floats_of_four(out.scales, out.rows) : _mm_set1_ps(1);
      for (int i = 0; i < count; i++) {
        const __m128 four = _mm_mul_ps(Vector::sum_four(sum[0][i], sum[1][i], sum[2][i], sum[3][i]), scales);
        if (out.rows >= at_once)
          _mm_storeu_ps(out.y + i * p.rows, four);
        else {
          float some[at_once];
          _mm_storeu_ps(some, four);
          std::memcpy(out.y + i * p.rows, some, out.rows * sizeof(float));
        }
      }
      return;
    }
    for (int r = 0; r < at_once; r++)
      for (int i = 0; i < count; i++)
        Vector::store(sums + (i * at_once + r) * size, sum[r][i]);
  }
  static EQQUANT_INLINE __m128 floats_of_four(const float* p, int count) {
    if (count >= at_once) return _mm_loadu_ps(p);
    float some[at_once] = {};
    std::memcpy(some, p, count * sizeof(float));
    return _mm_loadu_ps(some);
  }

  template <int count = Vector::most_at_once>
  static EQQUANT_INLINE void multiply_group(const Product& p, int rows, const float* w, const float* x,
                                            int64_t vectors, float* sums, bool first, bool last, Out out) {
    if (rows == count)
      multiply<count>(p, w, x, vectors, sums, first, last, out);
    else if constexpr (count > 1)
      multiply_group<count - 1>(p, rows, w, x, vectors, sums, first, last, out);
  }

  // `rows` of the weight, at most a tile of them, with some groups of the activation. Sums
  // are (quad, row of these groups, row % 4, value).
  void run(const float* x, int64_t row, int rows, const float* scales, int64_t first_group,
           int64_t last_group, float* sums) {
    const int used = (rows + at_once - 1) / at_once;
    const int64_t first = groups.first(first_group);
    const int64_t quad_sums = (groups.first(last_group) - first) * plane_stride;
    for (int64_t s = 0; s < steps; s += most_steps) {
      const int64_t count = std::min(most_steps, steps - s), last = s + count;
      // Where the chunk begins: in which block, at which step of it, at which byte.
      const int64_t b = s / block_steps, v = s % block_steps, byte = b * block + v * size;
      // How far on what is decoded next is: the hardware would have to find out at each row.
      const int64_t next = last < steps ? count * size : quads * at_once * p.packed - byte;
      for (int q = 0; q < used; q++)
        decode(row + q * at_once, rows - q * at_once, scales + q * at_once * p.blocks, b, v, byte,
               next, count, tile + q * quad_stride);
      for (int64_t g = first_group; g < last_group; g++) {
        const int some = groups.size(g);
        const float* from = x + groups.first(g) * stride + s * planes * some * size;
        for (int q = 0; q < used; q++)
          multiply_group(p, some, tile + q * quad_stride, from, count * planes,
                         sums + q * quad_sums + (groups.first(g) - first) * plane_stride, s == 0, last == steps,
                         Out{p.y + groups.first(g) * p.rows + row + q * at_once, scales + q * at_once, rows - q * at_once});
      }
    }
  }
};

template <int bits, Scaling scaling>
void all_tiles(const Product& p, const float* x, int64_t begin, int64_t end) {
  constexpr int64_t of_tile = quads * at_once;
  Tiles<bits, scaling> tiles{p, Groups(p)};
  const Groups& groups = tiles.groups;
  const int64_t bytes_of_group = (groups.rows + 1) * tiles.stride * 4;
  const int64_t in_turn = std::clamp<int64_t>(cached_bytes / bytes_of_group, 1, groups.count);
  std::vector<float> sums(of_tile * in_turn * (groups.rows + 1) * Vector::size);
  std::vector<float> buffer(p.bfloat16_scales ? of_tile * p.blocks : 0);
  for (int64_t group = 0; group < groups.count; group += in_turn)
    for (int64_t row = begin; row < end; row += of_tile) {
      const int rows = static_cast<int>(std::min(of_tile, end - row));
      tiles.run(x, row, rows, scales_of(p, row, rows, buffer.data()), group,
                std::min(groups.count, group + in_turn), sums.data());
    }
}

template <int bits>
void columns_of_many(const Product& p, const float* x, int64_t begin, int64_t end) {
  if (p.blocks == 1)
    all_tiles<bits, Scaling::row>(p, x, begin, end);
  else
    all_tiles<bits, Scaling::block>(p, x, begin, end);
}
