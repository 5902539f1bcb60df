"""The C++ of grouped experts around their activation: each on one thread, from its tokens to its outputs, and back."""

from __future__ import annotations

# As in `fast`, the projections are kept and the rest is computed again; a weight is multiplied into h, so its gradient
# is the product of dh and h. What an expert adds to a token has a row of its own, summed in the order of the choices:
# so the result does not depend on who was first.
EXPERTS = """
namespace {

// What one thread works with.
template <class T> struct Desk {
  const Task& t;
  const Plan plan;
  const int64_t d = t.d, f = t.d_ff, c = t.columns;
  const Sgemm sgemm = reinterpret_cast<Sgemm>(t.sgemm);
  float *wide, *h, *of_first, *of_second;
  double *of_first_bias, *of_second_bias;  // sums of as many numbers as an expert has rows
  T *xs, *dys, *pre, *scaled;
  uint32_t* spare;

  Desk(const Task& task, Room& room) : t(task), plan(task) {
    const int64_t widest = std::max(std::max(d, f), c), rows = std::min(kChunk, t.tokens * t.top_k);
    const bool floats = sizeof(T) == sizeof(float);
    wide = room.take<float>(std::max<int64_t>(1, rows) * widest);
    h = room.take<float>(f);
    of_first = room.take<float>(floats ? 0 : d * c);
    of_second = room.take<float>(floats ? 0 : f * d);
    of_first_bias = room.take<double>(c);
    of_second_bias = room.take<double>(d);
    xs = room.take<T>(rows * d);
    dys = room.take<T>(rows * d);
    pre = room.take<T>(rows * c);
    scaled = room.take<T>(rows * f);
    spare = room.take<uint32_t>(floats ? 0 : spare_for(std::max(widest, rows), widest));
  }

  template <class A> static Matrix<A> rows_of(A* data, int64_t columns) {
    return {data, std::max<int64_t>(1, columns), false};
  }
  static Matrix<T> of(const Stack& s, int64_t e) {
    return {static_cast<T*>(s.data) + e * s.expert, s.step, s.across != 0};
  }
  static T* bias(void* all, int64_t e, int64_t n) { return all ? static_cast<T*>(all) + e * n : nullptr; }
  float share(int64_t row) const { return t.shares[plan.choices[row]]; }

  void multiply(int64_t m, int64_t n, int64_t k, Matrix<const T> a, Matrix<const T> b, bool add, Matrix<float> to) {
    product(sgemm, m, n, k, a, b, add, to, spare);
  }

  void gather(const void* from, int64_t step, int64_t start, int64_t rows, T* to) const {
    for (int64_t r = 0; r < rows; ++r, to += d) {
      const T* row = static_cast<const T*>(from) + plan.choices[start + r] / t.top_k * step;
      std::copy(row, row + d, to);
    }
  }

  // a b, with a bias or, of each row, its share of one. BLAS may round by where its result lies: always at the desk.
  template <class F>
  void affine(int64_t rows, int64_t n, int64_t k, const T* a, Matrix<const T> b, const T* add, F factor, T* to) {
    multiply(rows, n, k, rows_of(a, k), b, false, rows_of(wide, n));
    for (int64_t r = 0; r < rows; ++r) {
      if (add) add_scaled(n, factor(r), add, wide + r * n);
      write(to + r * n, 1, n, wide + r * n);
    }
  }

  void forward(int64_t e, int64_t start, int64_t rows) {
    gather(t.x, t.x_step, start, rows, xs);
    T* in = t.kept ? static_cast<T*>(t.kept) + start * c : pre;
    affine(rows, c, d, xs, of(t.first, e), bias(t.first_bias, e, c), [](int64_t) { return 1.0f; }, in);
    for (int64_t r = 0; r < rows; ++r) {
      const T *g = in + r * c + t.g_at, *u = in + r * c + t.u_at;
      if (t.apart == 1) activate<1>(f, t.parameters, share(start + r), g, u, scaled + r * f);
      else activate<2>(f, t.parameters, share(start + r), g, u, scaled + r * f);
    }
    T* out = static_cast<T*>(t.outs) + start * d;
    affine(rows, d, f, scaled, of(t.second, e), bias(t.second_bias, e, d),
           [=](int64_t r) { return share(start + r); }, out);
  }

  // All rows of an expert: the gradients of its weights are sums over them.
  void backward(int64_t e) {
    const int64_t start = plan.starts[e], rows = plan.starts[e + 1] - start, pieces = (rows + kChunk - 1) / kChunk;
    if (t.d_first_bias) std::fill_n(of_first_bias, c, 0.0);
    if (t.d_second_bias) std::fill_n(of_second_bias, d, 0.0);
    for (int64_t i = 0; i < pieces; ++i) {
      const int64_t from = rows * i / pieces, to = rows * (i + 1) / pieces;
      backward(e, start + from, to - from, i > 0);
    }
    settle(t.d_first, e, d, c, of_first, rows == 0);
    settle(t.d_second, e, f, d, of_second, rows == 0);
    settle(bias(t.d_first_bias, e, c), c, of_first_bias);
    settle(bias(t.d_second_bias, e, d), d, of_second_bias);
  }

  void backward(int64_t e, int64_t start, int64_t rows, bool add) {
    gather(t.dy, t.dy_step, start, rows, dys);
    multiply(rows, f, d, rows_of<const T>(dys, d), flipped<const T>(of(t.second, e)), false, rows_of(wide, f));
    const T* in = static_cast<const T*>(t.kept) + start * c;
    const T* second_bias = bias(t.second_bias, e, d);
    for (int64_t r = 0; r < rows; ++r) {
      const float *dh = wide + r * f, share = this->share(start + r);
      const T *g = in + r * c + t.g_at, *u = in + r * c + t.u_at;
      T *dg = pre + r * c + t.g_at, *du = pre + r * c + t.u_at;
      if (t.apart == 1) activate_back<1>(f, t.parameters, share, g, u, dh, h, scaled + r * f, dg, du);
      else activate_back<2>(f, t.parameters, share, g, u, dh, h, scaled + r * f, dg, du);
      if (t.d_shares) {
        const float of_bias = second_bias ? dot(d, dys + r * d, second_bias) : 0.0f;
        t.d_shares[plan.choices[start + r]] = dot(f, dh, h) + of_bias;
      }
      if (t.d_second_bias) add_scaled(d, share, dys + r * d, of_second_bias);
      if (t.d_first_bias) add_scaled(c, 1.0f, pre + r * c, of_first_bias);
    }
    if (t.d_second.data)
      multiply(f, d, rows, flipped(rows_of<const T>(scaled, f)), rows_of<const T>(dys, d), add,
               sums(t.d_second, e, of_second, f, d));
    if (t.d_first.data) {
      gather(t.x, t.x_step, start, rows, xs);
      multiply(d, c, rows, flipped(rows_of<const T>(xs, d)), rows_of<const T>(pre, c), add,
               sums(t.d_first, e, of_first, d, c));
    }
    if (t.dx)
      affine(rows, d, c, pre, flipped<const T>(of(t.first, e)), nullptr, [](int64_t) { return 0.0f; },
             static_cast<T*>(t.outs) + start * d);
  }

  // Where the gradient of an expert's matrix is summed: in its place if that is of floats.
  static Matrix<float> sums(const Stack& place, int64_t e, float* beside, int64_t rows, int64_t columns) {
    if constexpr (sizeof(T) == sizeof(float)) return of(place, e);
    else return {beside, std::max<int64_t>(1, place.across ? rows : columns), place.across != 0};
  }
  static void settle(const Stack& place, int64_t e, int64_t rows, int64_t columns, const float* found, bool idle) {
    if (!place.data || (!idle && sizeof(T) == sizeof(float))) return;
    const Matrix<T> to = of(place, e);
    const int64_t outer = to.across ? columns : rows, inner = to.across ? rows : columns;
    if (idle && to.step == inner) {
      std::memset(to.data, 0, static_cast<size_t>(outer * inner) * sizeof(T));
      return;
    }
    for (int64_t i = 0; i < outer; ++i) {
      if (idle) std::memset(to.data + i * to.step, 0, static_cast<size_t>(inner) * sizeof(T));
      else write(to.data + i * to.step, 1, inner, found + i * inner);
    }
  }

  static void settle(T* to, int64_t n, const double* found) {
    for (int64_t i = 0; to && i < n; ++i) narrow(static_cast<float>(found[i]), to[i]);
  }

  // The sum of what a token's choices gave, in their order; `wide` holds it on the way.
  void combine(int64_t token, T* to) {
    std::fill_n(wide, d, 0.0f);
    const int64_t* places = plan.places + token * t.top_k;
    for (int64_t j = 0; j < t.top_k; ++j) add_scaled(d, 1.0f, static_cast<const T*>(t.outs) + places[j] * d, wide);
    write(to + token * d, 1, d, wide);
  }
};

using Limit = int (*)(int);

// A thread of the team takes what comes next, at a desk of its own; the largest come first. Then tokens are combined.
template <class T, class Work> void each(const Task& t, int64_t works, T* combined, Work work) {
  Room size{0};
  Desk<T> measure(t, size);
  const auto act = [&](int64_t thread) {
    Room room{reinterpret_cast<uintptr_t>(t.room) + thread * size.at};
    return Desk<T>(t, room);
  };
  const Limit limit = reinterpret_cast<Limit>(t.limit);
#ifdef _OPENMP
  const int64_t products = t.tokens * t.top_k * t.d * (t.columns + t.d_ff);
  const int team = static_cast<int>(std::min(std::min(t.threads, works), 1 + products / kGrain));
  if (team > 1) {
#pragma omp parallel num_threads(team)
    {
      const int before = limit(1);
      Desk<T> desk = act(omp_get_thread_num());
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < works; ++i) work(desk, i);
      if (combined) {
#pragma omp for schedule(static)
        for (int64_t token = 0; token < t.tokens; ++token) desk.combine(token, combined);
      }
      limit(before);
    }
    return;
  }
#endif
  const int before = limit(1);
  Desk<T> desk = act(0);
  for (int64_t i = 0; i < works; ++i) work(desk, i);
  for (int64_t token = 0; combined && token < t.tokens; ++token) desk.combine(token, combined);
  limit(before);
}

std::vector<int64_t> by_load(const Task& t, const Plan& plan) {
  std::vector<int64_t> found(static_cast<size_t>(t.experts));
  for (int64_t e = 0; e < t.experts; ++e) found[static_cast<size_t>(e)] = e;
  std::stable_sort(found.begin(), found.end(), [&](int64_t a, int64_t b) {
    return plan.starts[a + 1] - plan.starts[a] > plan.starts[b + 1] - plan.starts[b];
  });
  return found;
}

template <class T> void forward(const Task& t) {
  const Plan plan(t);
  struct Piece { int64_t expert, start, rows; };
  std::vector<Piece> pieces;
  for (int64_t e : by_load(t, plan)) {
    const int64_t start = plan.starts[e], rows = plan.starts[e + 1] - start, count = (rows + kChunk - 1) / kChunk;
    for (int64_t i = 0; i < count; ++i)
      pieces.push_back({e, start + rows * i / count, rows * (i + 1) / count - rows * i / count});
  }
  each<T>(t, static_cast<int64_t>(pieces.size()), static_cast<T*>(t.y), [&](Desk<T>& desk, int64_t i) {
    const Piece& piece = pieces[static_cast<size_t>(i)];
    desk.forward(piece.expert, piece.start, piece.rows);
  });
}

template <class T> void backward(const Task& t) {
  const Plan plan(t);
  const std::vector<int64_t> order = by_load(t, plan);
  each<T>(t, t.experts, static_cast<T*>(t.dx), [&](Desk<T>& desk, int64_t i) {
    desk.backward(order[static_cast<size_t>(i)]);
  });
}

template <class T> int64_t room(const Task& t) {
  Room size{0};
  Desk<T> measure(t, size);
  return static_cast<int64_t>(size.at);
}

}  // namespace

// Sort the choices by expert, those of earlier tokens first; 0 if one names no expert.
extern "C" int64_t route(const Task* t, const int64_t* indices) {
  const Plan plan(*t);
  const int64_t choices = t->tokens * t->top_k;
  std::fill_n(plan.starts, t->experts + 1, int64_t(0));
  for (int64_t i = 0; i < choices; ++i) {
    if (indices[i] < 0 || indices[i] >= t->experts) return 0;
    ++plan.starts[indices[i] + 1];
  }
  std::vector<int64_t> next(static_cast<size_t>(t->experts));
  for (int64_t e = 0; e < t->experts; ++e) {
    next[static_cast<size_t>(e)] = plan.starts[e];
    plan.starts[e + 1] += plan.starts[e];
  }
  for (int64_t i = 0; i < choices; ++i) {
    const int64_t row = next[static_cast<size_t>(indices[i])]++;
    plan.choices[row] = i;
    plan.places[i] = row;
  }
  return 1;
}
"""
