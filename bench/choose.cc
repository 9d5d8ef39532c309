// What a backend's choose.h prefers, of kernels that are known to run a product. Compiled with the file and the
// backend's name, for `python -m bench.choices --of`.
#include JAXGEMV_CHOOSE

#include <cstring>

extern "C" int jaxgemv_bench_choose(const int64_t (&numbers)[5], const char* const* texts,
                                    int count) {
  using namespace jaxgemv;
  Problem problem;
  problem.N = numbers[0], problem.K = numbers[1], problem.M = numbers[2];
  problem.group = numbers[3], problem.bits = static_cast<int>(numbers[4]);
  for (const Dtype dtype : kDtypes)
    if (name_of(dtype) == texts[0]) problem.x = problem.y = dtype;
  for (int i = 0; i < 4; ++i)
    if (std::strcmp(kFormatNames[i], texts[1]) == 0) problem.format = Format(i);
  const std::string_view shift = texts[2], scale = texts[3];
  problem.affine = shift == "zero"     ? Affine::kZero
                   : shift == "offset" ? Affine::kOffset
                                       : Affine::kSymmetric;
  const OperandSet given =
      scale.starts_with("float8") ? OperandSet::of(Operand::kOneByteScale) : OperandSet{};
  // Above these rows XLA's product with a written weight is chosen, by whatever writes that.
  const auto is_written = [&](const auto& p) {
    using namespace JAXGEMV_BACKEND;
    if constexpr (requires { most_rounded_rows(9, p, true); })
      return p.M > most_rounded_rows(9, p, !given.empty());
    return false;
  };
  if (is_written(problem))
    for (int i = 0; i < count; ++i)
      if (std::strcmp(texts[4 + i], "dequantize") == 0 || std::strcmp(texts[4 + i], "XLA") == 0)
        return i;
  for (const Crossover& crossover : JAXGEMV_BACKEND::kCrossovers)
    for (int i = 0; i < count; ++i) {
      const KernelInfo info{texts[4 + i], problem.format, problem.bits, problem.x, 0, {}};
      if (crossover.prefers(info, problem, given)) return i;
    }
  return 0;
}
