// The selective path of the CPU as the device, compiled once for each instruction set like sweep.cpp.
//
// The contract is kernels/selective.py's, bit for bit. Everything here streams through whole rows,
// because even a few percent of the columns lie in most cache lines of a row-major matrix. So memory
// decides the speed, and what needs the same bytes is done in one pass.
#include "api.h"
#include "lanes.h"
#include "rows.h"

namespace zenflow::ZENFLOW_ISA {

extern const InstructionSet instruction_set;  // sweep.cpp

namespace {

// Elements of a selective update at a time: they and the weights made of them stay in the cache.
constexpr size_t kChunk = 1024;

template <class Format>
struct Largest {
  typename Format::Vector magnitude = {};

  ZENFLOW_INLINE void add(typename Format::Vector bits) {
    bits &= Format::magnitude;
    magnitude = bits > magnitude ? bits : magnitude;
  }
  bool finite() const {
    for (size_t i = 0; i < Format::n; ++i) {
      if (magnitude[i] >= Format::infinity) return false;
    }
    return true;
  }
};

template <class Format, size_t n>
ZENFLOW_INLINE void add_all(
    Largest<Format>& largest, const typename Format::Element* const (&rows)[n], size_t count) {
  using Vector = typename Format::Vector;
  size_t i = 0;
  for (; count - i >= Format::n; i += Format::n) {
    ZENFLOW_EACH_ROW {
      __builtin_prefetch(advance(rows[k] + i, kAheadBytes));
      largest.add(load_vector<Vector>(rows[k] + i));
    }
  }
  if (i < count) ZENFLOW_EACH_ROW largest.add(load_part<Vector>(rows[k] + i, count - i));
}

template <class Format>
bool all_finite(const void* grad, size_t numel) {
  using Element = typename Format::Element;
  Largest<Format> largest;
  const Element* from = static_cast<const Element*>(grad);
  const size_t apart = numel / kStreams;
  add_all(largest, {from, from + apart, from + 2 * apart, from + 3 * apart}, apart);
  add_all(largest, {from + kStreams * apart}, numel - kStreams * apart);
  return largest.finite();
}

template <class Element>
ZENFLOW_INLINE void gather_row(const Side& s, Element* to, const Element* row) {
  if (s.kernel_numel == 1) {
    for (size_t i = 0; i < s.num_selected; ++i) to[i] = row[s.channels[i]];
    return;
  }
  for (size_t i = 0; i < s.num_selected; ++i) {
    const Element* channel = row + s.channels[i] * s.kernel_numel;
    for (size_t j = 0; j < s.kernel_numel; ++j) to[i * s.kernel_numel + j] = channel[j];
  }
}

template <class Format>
bool take(const Side& s, const void* grad) {
  using Element = typename Format::Element;
  Largest<Format> largest;
  for_rows(s.num_rows, [&](const auto& rows) {
    constexpr size_t n = sizeof rows.at / sizeof *rows.at;
    const Element* from[n];
    ZENFLOW_EACH_ROW from[k] = static_cast<const Element*>(grad) + rows.at[k] * s.row_numel;
    add_all(largest, from, s.row_numel);
    ZENFLOW_EACH_ROW {
      Element* to = static_cast<Element*>(s.selected_grad);
      gather_row(s, to + rows.at[k] * s.num_selected * s.kernel_numel, from[k]);
    }
  });
  return largest.finite();
}

// Rounded weights of the selected state from `first` to `last` into their places.
template <class Element>
void scatter(const Side& s, const Element* from, size_t first, size_t last) {
  const size_t row_selected = s.num_selected * s.kernel_numel;
  const size_t rows_ahead = 1 + 128 / row_selected;
  size_t row = first / row_selected, i = first % row_selected;
  for (size_t at = first; at < last; ++row, i = 0) {
    Element* weights = advance(static_cast<Element*>(s.weight), row * s.row_stride);
    const size_t end = row_selected - i < last - at ? row_selected : i + (last - at);
    at += end - i;
    if (s.kernel_numel == 1) {
      for (; i < end; ++i) {
        Element* weight = weights + s.channels[i];
        __builtin_prefetch(advance(weight, rows_ahead * s.row_stride), 1);
        *weight = *from++;
      }
    } else {
      for (; i < end; ++i) {
        weights[s.channels[i / s.kernel_numel] * s.kernel_numel + i % s.kernel_numel] = *from++;
      }
    }
  }
}

template <class Weight>
void update(const Side& s, const void* grad, const Coefficients& c) {
  constexpr size_t kGradBytes[kNumElementTypes] = {4, 2, 2};
  const Sweep sweep = instruction_set.sweep[s.grad_type][s.weight_type];
  SweepArgs args = {0, s.master, s.exp_avg, s.exp_avg_sq, s.weight, &grad, &c, 1, 0, 1.0f, 0.0f};
  if (!s.channels) {
    args.numel = s.num_rows * s.row_numel;
    return sweep(args);
  }
  const size_t numel = s.num_rows * s.num_selected * s.kernel_numel;
  typename Weight::Stored weights[kChunk];
  args.out = weights;
  for (size_t at = 0; at < numel; at += args.numel) {
    args.numel = numel - at < kChunk ? numel - at : kChunk;
    sweep(args);
    scatter(s, weights, at, at + args.numel);
    args.master += args.numel;
    args.exp_avg += args.numel;
    args.exp_avg_sq += args.numel;
    grad = advance(static_cast<const char*>(grad), args.numel * kGradBytes[s.grad_type]);
  }
}

// What is written where `staged` is published: selected channels keep what they have.
template <class Bits>
ZENFLOW_INLINE typename Bits::Vector published(
    typename Bits::Vector weights, typename Bits::Vector staged, typename Bits::Mask is_selected) {
  using Vector = typename Bits::Vector;
  return __builtin_convertvector(is_selected, Vector) != 0 ? weights : staged;
}

// Elements of some rows from `first` to `last`. `sums`, if any, get their lanes of eight bytes added.
template <class Bits, bool publishing, size_t n>
ZENFLOW_INLINE void pass_over(
    const Side& s, const void* staged, const Rows<n>& rows, size_t first, size_t last, size_t ahead, Longs* sums) {
  using Element = typename Bits::Element;
  using Vector = typename Bits::Vector;
  Element* weights[n];
  const Element* new_weights[n];
  ZENFLOW_EACH_ROW {
    weights[k] = advance(static_cast<Element*>(s.weight), rows.at[k] * s.row_stride);
    new_weights[k] = static_cast<const Element*>(staged) + rows.at[k] * s.row_numel;
  }
  for (size_t i = first; i < last; i += Bits::n) {
    const size_t left = last - i;
    typename Bits::Mask is_selected = {};
    if (publishing && s.is_selected) {
      is_selected = load_up_to<typename Bits::Mask>(s.is_selected + i, left);
    }
    Longs sum = {};
    ZENFLOW_EACH_ROW {
      __builtin_prefetch(advance(weights[k] + i, ahead), publishing);
      Vector bits = load_up_to<Vector>(weights[k] + i, left);
      if (publishing) {
        __builtin_prefetch(advance(new_weights[k] + i, kAheadBytes));
        bits = published<Bits>(bits, load_up_to<Vector>(new_weights[k] + i, left), is_selected);
        memcpy(weights[k] + i, &bits, left >= Bits::n ? sizeof bits : left * sizeof(Element));
      }
      sum += bits_of<Longs>(bits);
    }
    if (sums) *sums++ += sum;
  }
}

// Sums over the rows, lane by lane, some lanes at a time: `finish(first lane, lanes, their sums)`.
constexpr size_t kStripLanes = 512;

template <class Bits, bool publishing, class Finish>
ZENFLOW_INLINE void sum_lanes_of_eight(const Side& s, const void* staged, Finish finish) {
  constexpr size_t kPerLane = 8 / sizeof(typename Bits::Element);
  for (size_t first = 0; first < s.num_lanes; first += kStripLanes) {
    const size_t count = s.num_lanes - first < kStripLanes ? s.num_lanes - first : kStripLanes;
    const size_t rows_ahead = (kAheadBytes + count * 8 - 1) / (count * 8);
    Longs sums[kStripLanes * 8 / kVectorBytes] = {};
    for_rows(s.num_rows, [&](const auto& rows) {
      pass_over<Bits, publishing>(
          s, staged, rows, first * kPerLane, (first + count) * kPerLane, rows_ahead * s.row_stride, sums);
    });
    finish(first, count, reinterpret_cast<const int64_t*>(sums));
  }
}

template <class Lane, class Finish>
ZENFLOW_INLINE void sum_narrow_lanes(const Side& s, Finish finish) {
  for (size_t first = 0; first < s.num_lanes; first += kStripLanes) {
    const size_t count = s.num_lanes - first < kStripLanes ? s.num_lanes - first : kStripLanes;
    int64_t sums[kStripLanes] = {};
    for (size_t row = 0; row < s.num_rows; ++row) {
      const Lane* lanes = advance(static_cast<const Lane*>(s.weight), row * s.row_stride) + first;
      for (size_t i = 0; i < count; ++i) sums[i] += lanes[i];
    }
    finish(first, count, sums);
  }
}

template <class Finish>
ZENFLOW_INLINE void sum_lanes(const Side& s, Finish finish) {
  if (s.lane_bytes == 8) {
    sum_lanes_of_eight<Bits32, false>(s, nullptr, finish);
  } else if (s.lane_bytes == 4) {
    sum_narrow_lanes<int32_t>(s, finish);
  } else {
    sum_narrow_lanes<int16_t>(s, finish);
  }
}

void fingerprint(const Side& s) {
  sum_lanes(s, [&s](size_t first, size_t count, const int64_t* sums) {
    memcpy(s.fingerprint + first, sums, count * sizeof *sums);
  });
}

size_t num_changed(const Side& s) {
  size_t changed = 0;
  sum_lanes(s, [&](size_t first, size_t count, const int64_t* sums) {
    for (size_t i = 0; i < count; ++i) {
      changed += s.deferred_lanes[first + i] && sums[i] != s.fingerprint[first + i];
    }
  });
  return changed;
}

template <class Bits>
void publish(const Side& s, const void* staged) {
  if (s.lane_bytes == 8) {
    sum_lanes_of_eight<Bits, true>(s, staged, [&s](size_t first, size_t count, const int64_t* sums) {
      memcpy(s.fingerprint + first, sums, count * sizeof *sums);
    });
    return;
  }
  for_rows(s.num_rows, [&](const auto& rows) {
    pass_over<Bits, true>(s, staged, rows, 0, s.row_numel, kAheadBytes, nullptr);
  });
  fingerprint(s);
}

ZENFLOW_INLINE Floats within(Floats x, float bound) {
  x = x > bound ? Floats{} + bound : x;
  return x < -bound ? Floats{} - bound : x;
}

// As many elements as there are floats in a vector, as lanes of eight bytes.
template <size_t bytes>
struct LanesOf {
  typedef uint64_t Vector __attribute__((vector_size(bytes)));
};

// kernels/selective.py's `preview`, of elements of some rows; the sums as in pass_over. A piece is stored and
// added while it is in one register: to read back what was stored in parts would stall.
template <class Weight, size_t n, class Sums>
ZENFLOW_INLINE void show(
    const Side& s, const void* grad, float scale, float size, const Rows<n>& rows, size_t first, size_t last,
    size_t ahead, Sums* sums) {
  using Stored = typename Weight::Stored;
  constexpr float kLargest = 1e30f, kBound = 3.0f;
  const float* by_column = s.factors + s.num_rows;
  Stored* weights[n];
  const Stored* grads[n];
  float factors[n];
  ZENFLOW_EACH_ROW {
    weights[k] = advance(static_cast<Stored*>(s.weight), rows.at[k] * s.row_stride);
    grads[k] = static_cast<const Stored*>(grad) + rows.at[k] * s.row_numel;
    factors[k] = s.factors[rows.at[k]] * scale;
  }
  const auto moved = [&](Floats weight, Floats gradient, float factor, Floats columns) {
    return weight - within(within(gradient * factor, kLargest) * columns, kBound) * size;
  };
  size_t i = first;
  for (; last - i >= kLanes; i += kLanes) {
    const Floats columns = load_vector<Floats>(by_column + i);
    Sums sum = {};
    ZENFLOW_EACH_ROW {
      __builtin_prefetch(advance(weights[k] + i, ahead), 1);
      __builtin_prefetch(advance(grads[k] + i, kAheadBytes));
      Stored piece[kLanes];
      Weight::store(piece, moved(Weight::load(weights[k] + i), Weight::load(grads[k] + i), factors[k], columns));
      memcpy(weights[k] + i, piece, sizeof piece);
      sum += load_vector<Sums>(piece);
    }
    if (sums) *sums++ += sum;
  }
  if (i == last) return;
  const size_t bytes = (last - i) * sizeof(Stored);
  float columns[kLanes] = {};
  memcpy(columns, by_column + i, (last - i) * sizeof *columns);
  ZENFLOW_EACH_ROW {
    Stored weight[kLanes] = {}, from[kLanes] = {}, piece[kLanes];
    memcpy(weight, weights[k] + i, bytes);
    memcpy(from, grads[k] + i, bytes);
    Weight::store(piece, moved(Weight::load(weight), Weight::load(from), factors[k], load_vector<Floats>(columns)));
    memcpy(weights[k] + i, piece, bytes);
    memcpy(weight, piece, bytes);  // zeros behind the end
    if (sums) *sums += load_vector<Sums>(weight);
  }
}

template <class Weight>
void preview(const Side& s, const void* grad, float scale, float size) {
  using Stored = typename Weight::Stored;
  using Sums = typename LanesOf<kLanes * sizeof(Stored)>::Vector;
  if (s.lane_bytes != 8) {
    for_rows(s.num_rows, [&](const auto& rows) {
      show<Weight>(s, grad, scale, size, rows, 0, s.row_numel, kAheadBytes, static_cast<Sums*>(nullptr));
    });
    return fingerprint(s);
  }
  constexpr size_t kPerLane = 8 / sizeof(Stored);
  for (size_t first = 0; first < s.num_lanes; first += kStripLanes) {
    const size_t count = s.num_lanes - first < kStripLanes ? s.num_lanes - first : kStripLanes;
    const size_t rows_ahead = (kAheadBytes + count * 8 - 1) / (count * 8);
    Sums sums[kStripLanes * 8 / sizeof(Sums)] = {};
    for_rows(s.num_rows, [&](const auto& rows) {
      show<Weight>(
          s, grad, scale, size, rows, first * kPerLane, (first + count) * kPerLane, rows_ahead * s.row_stride,
          sums);
    });
    memcpy(s.fingerprint + first, sums, count * sizeof *s.fingerprint);
  }
}

template <class Weight>
size_t num_different(const Side& s) {
  using Stored = typename Weight::Stored;
  const size_t numel = s.num_rows * s.row_numel;
  const Stored* weights = static_cast<const Stored*>(s.weight);
  Ints count = {};
  for (size_t i = 0; i < numel; i += kLanes) {
    const size_t n = numel - i < kLanes ? numel - i : kLanes;
    float masters[kLanes] = {};
    Stored rounded[kLanes], actual[kLanes] = {};
    memcpy(masters, s.master + i, n * sizeof *masters);
    memcpy(actual, weights + i, n * sizeof *actual);
    Weight::store(rounded, Fp32::load(masters));
    count -= Weight::load(rounded) != Weight::load(actual);
  }
  size_t total = 0;
  for (size_t i = 0; i < kLanes; ++i) total += static_cast<uint32_t>(count[i]);
  return total;
}

// Columns are summed over rows as a binary tree over pairs of neighbours: partial[l] is a finished
// subtree of 2**l rows, as a counter's bits are.
constexpr size_t kColumns = 128;
constexpr size_t kMaxLevels = 24;

template <size_t n>
ZENFLOW_INLINE void add_to(Floats (&sum)[n], const Floats (&earlier)[n]) {
  for (size_t j = 0; j < n; ++j) sum[j] = earlier[j] + sum[j];
}

template <class Grad>
void energy(const void* grad, size_t num_rows, size_t row_numel, size_t block_rows, float* out) {
  using Stored = typename Grad::Stored;
  constexpr size_t n = kColumns / kLanes;
  Floats partial[kMaxLevels][n];
  for (size_t first = 0; first < row_numel; first += kColumns) {
    const size_t count = row_numel - first < kColumns ? row_numel - first : kColumns;
    Floats total[n] = {};
    for (size_t start = 0; start < num_rows; start += block_rows) {
      const size_t rows = num_rows - start < block_rows ? num_rows - start : block_rows;
      for (size_t r = 0; r < rows; ++r) {
        const Stored* row = static_cast<const Stored*>(grad) + (start + r) * row_numel + first;
        Floats sum[n] = {};
        for (size_t j = 0; j * kLanes < count; ++j) {
          Stored padded[kLanes] = {};
          const bool whole = count - j * kLanes >= kLanes;
          if (!whole) memcpy(padded, row + j * kLanes, (count - j * kLanes) * sizeof *row);
          const Floats g = Grad::load(whole ? row + j * kLanes : padded);
          sum[j] = g * g;
        }
        size_t level = 0;
        for (; r >> level & 1; ++level) add_to(sum, partial[level]);
        memcpy(partial[level], sum, sizeof sum);
      }
      Floats sum[n] = {};
      for (size_t level = 0; rows >> level; ++level) {
        if (rows >> level & 1) add_to(sum, partial[level]);
      }
      for (size_t j = 0; j < n; ++j) total[j] += sum[j];
    }
    memcpy(out + first, total, count * sizeof *out);
  }
}

// One function for each element type.

bool take_any(const Side& s, const void* grad) {
  constexpr bool (*kTake[])(const Side&, const void*) = {
      take<Fp32Format>, take<Bf16Format>, take<Fp16Format>};
  return kTake[s.grad_type](s, grad);
}

bool all_finite_any(const void* grad, int grad_type, size_t numel) {
  constexpr bool (*kAllFinite[])(const void*, size_t) = {
      all_finite<Fp32Format>, all_finite<Bf16Format>, all_finite<Fp16Format>};
  return kAllFinite[grad_type](grad, numel);
}

void update_any(const Side& s, const void* grad, const Coefficients& c) {
  constexpr void (*kUpdate[])(const Side&, const void*, const Coefficients&) = {
      update<Fp32>, update<Bf16>, update<Fp16>};
  kUpdate[s.weight_type](s, grad, c);
}

void publish_any(const Side& s, const void* staged) {
  constexpr void (*kPublish[])(const Side&, const void*) = {
      publish<Bits32>, publish<Bits16>, publish<Bits16>};
  kPublish[s.weight_type](s, staged);
}

void preview_any(const Side& s, const void* grad, float scale, float size) {
  constexpr void (*kPreview[])(const Side&, const void*, float, float) = {
      preview<Fp32>, preview<Bf16>, preview<Fp16>};
  kPreview[s.weight_type](s, grad, scale, size);
}

size_t num_different_any(const Side& s) {
  constexpr size_t (*kNumDifferent[])(const Side&) = {
      num_different<Fp32>, num_different<Bf16>, num_different<Fp16>};
  return kNumDifferent[s.weight_type](s);
}

void energy_any(
    const void* grad, int grad_type, size_t num_rows, size_t row_numel, size_t block_rows, float* out) {
  constexpr void (*kEnergy[])(const void*, size_t, size_t, size_t, float*) = {
      energy<Fp32>, energy<Bf16>, energy<Fp16>};
  kEnergy[grad_type](grad, num_rows, row_numel, block_rows, out);
}

}  // namespace

extern const Select select;
const Select select = {
    take_any,    all_finite_any, update_any,        publish_any,
    preview_any, num_changed,    num_different_any, energy_any,
};

}  // namespace zenflow::ZENFLOW_ISA
