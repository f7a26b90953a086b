// Functions of fp32 numbers, spelled out operation by operation: whoever gives the operations of `Isa` as IEEE 754
// rounds them (fma in one rounding) gets the same bits. No include guard: included where F, I and Isa are
// declared, in a namespace of its own for each instruction set, and where SANTA_FUNCTION says what kind of
// functions these are.

// exp for arguments in [-87, 0]; below, 0. exp(x) = 2^n exp(r) with |r| <= ln(2)/2, where the Taylor polynomial
// of degree 7 is off by 5e-9 relative, a fraction of fp32's rounding.
SANTA_FUNCTION F exponential(F x) {
  const F lowest = Isa::set1(-87.0f);
  const F bounded = Isa::max(x, lowest);
  const F n = Isa::round(Isa::mul(bounded, Isa::set1(1.44269504f)));
  // ln(2) in two parts: the first has 9 bits, so its product with n is exact.
  F r = Isa::fma(n, Isa::set1(-0.693359375f), bounded);
  r = Isa::fma(n, Isa::set1(2.12194440e-4f), r);
  F p = Isa::set1(1.0f / 5040);
  p = Isa::fma(p, r, Isa::set1(1.0f / 720));
  p = Isa::fma(p, r, Isa::set1(1.0f / 120));
  p = Isa::fma(p, r, Isa::set1(1.0f / 24));
  p = Isa::fma(p, r, Isa::set1(1.0f / 6));
  p = Isa::fma(p, r, Isa::set1(0.5f));
  p = Isa::fma(p, r, Isa::set1(1.0f));
  p = Isa::fma(p, r, Isa::set1(1.0f));
  return Isa::zero_below(x, lowest, Isa::scale_by_power(p, n));
}

// tanh(x) from u = tanh(x / 2) as 2u / (1 + u^2), with u the seventh convergent of Lambert's continued fraction
// x / (1 + x^2 / (3 + x^2 / (5 + ...))): off by 2.7e-7 relative at most. Bounding first costs nothing, since
// tanh(10) is 1 in fp32, and keeps NaN, which max and min return when it is their second argument.
SANTA_FUNCTION F hyperbolic_tangent_of_twice(F half) {
  const F x = Isa::min(Isa::set1(5.0f), Isa::max(Isa::set1(-5.0f), half));
  const F z = Isa::mul(x, x);
  F p = Isa::add(z, Isa::set1(378.0f));
  p = Isa::fma(p, z, Isa::set1(17325.0f));
  p = Isa::fma(p, z, Isa::set1(135135.0f));
  F q = Isa::fma(Isa::set1(28.0f), z, Isa::set1(3150.0f));
  q = Isa::fma(q, z, Isa::set1(62370.0f));
  q = Isa::fma(q, z, Isa::set1(135135.0f));
  const F u = Isa::div(Isa::mul(x, p), q);
  return Isa::div(Isa::add(u, u), Isa::fma(u, u, Isa::set1(1.0f)));
}

// cap * tanh(x / cap), with 0.5 / cap given.
SANTA_FUNCTION F capped(F x, F half_inverse, F cap) {
  return Isa::mul(hyperbolic_tangent_of_twice(Isa::mul(x, half_inverse)), cap);
}

// The weight of a row in units of 2^-30, from its score less the largest one.
SANTA_FUNCTION I integer_weight(F shifted) {
  return Isa::to_int(Isa::mul(exponential(shifted), Isa::set1(kWeightScale)));
}

// The square of a row's size for the shared sample, head after head. Products and sums stay apart (no fma).
SANTA_FUNCTION F add_square(F square, I weight, F reciprocal) {
  const F p = Isa::mul(Isa::to_float(weight), reciprocal);
  return Isa::add(square, Isa::mul(p, p));
}

// min(1, samples * sqrt(square)) in units of 2^-30.
SANTA_FUNCTION I integer_inclusion(F square, F samples) {
  const F share = Isa::min(Isa::mul(samples, Isa::sqrt(square)), Isa::set1(1.0f));
  return Isa::to_int(Isa::mul(share, Isa::set1(kWeightScale)));
}
