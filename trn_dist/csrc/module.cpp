// The Python module trn_dist._C: one init function for each part.

#include <torch/extension.h>

namespace trn {
void init_device(pybind11::module_& m);
void init_c10d(pybind11::module_& m);
void init_timing(pybind11::module_& m);
} // namespace trn

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  trn::init_device(m);
  trn::init_c10d(m);
  trn::init_timing(m);
}
