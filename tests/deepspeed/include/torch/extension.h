// What DeepSpeed's extensions for CPUs need of PyTorch's header of this name: without its operators and the C++ frontend a compiler reads it in half of the time.
#pragma once
#include <torch/csrc/utils/pybind.h>
namespace torch {
using namespace at;
constexpr auto kFloat32 = at::kFloat;
}
