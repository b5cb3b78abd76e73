// What DeepSpeed's extensions need of PyTorch's header of this name, without the C++ frontend, which takes a compiler longer to read than all else.
#pragma once
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>
#include <torch/types.h>
