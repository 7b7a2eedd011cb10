// What trn_dist.neuron sees of the device. The rest of torch.neuron goes through PyTorch's own accelerator functions.

#include "device/Allocator.h"
#include "device/Arena.h"
#include "device/Device.h"
#include "device/Fallback.h"
#include "device/Generator.h"
#include "device/Ledger.h"
#include "device/Stream.h"

#include <torch/extension.h>

namespace trn {

void register_hooks();

namespace {

pybind11::dict stat_dict(const c10::CachingAllocator::StatArray& stats) {
  static constexpr const char* kNames[] = {"all", "small_pool", "large_pool"};
  pybind11::dict result;
  for (size_t i = 0; i < stats.size(); ++i) {
    pybind11::dict entry;
    entry["current"] = stats[i].current;
    entry["peak"] = stats[i].peak;
    entry["allocated"] = stats[i].allocated;
    entry["freed"] = stats[i].freed;
    result[kNames[i]] = entry;
  }
  return result;
}

// The statistics in the nested form of torch.cuda.memory_stats_as_nested_dict.
pybind11::dict memory_stats(c10::DeviceIndex device) {
  const auto stats = Ledger::of(device).stats();
  pybind11::dict result;
  result["num_alloc_retries"] = stats.num_alloc_retries;
  result["num_ooms"] = stats.num_ooms;
  result["num_device_alloc"] = stats.num_device_alloc;
  result["num_device_free"] = stats.num_device_free;
  result["allocation"] = stat_dict(stats.allocation);
  result["segment"] = stat_dict(stats.segment);
  result["active"] = stat_dict(stats.active);
  result["inactive_split"] = stat_dict(stats.inactive_split);
  result["allocated_bytes"] = stat_dict(stats.allocated_bytes);
  result["reserved_bytes"] = stat_dict(stats.reserved_bytes);
  result["active_bytes"] = stat_dict(stats.active_bytes);
  result["inactive_split_bytes"] = stat_dict(stats.inactive_split_bytes);
  result["requested_bytes"] = stat_dict(stats.requested_bytes);
  return result;
}

// The segments of one device in the form of torch.cuda.memory_snapshot().
pybind11::list memory_segments(c10::DeviceIndex device) {
  pybind11::list segments;
  for (const auto& segment : Ledger::of(device).snapshot()) {
    pybind11::list blocks;
    uint64_t allocated = 0;
    uint64_t requested = 0;
    for (const auto& block : segment.blocks) {
      pybind11::dict entry;
      entry["address"] = block.address;
      entry["size"] = block.size;
      entry["requested_size"] = block.requested;
      entry["state"] = block.free ? "inactive" : "active_allocated";
      entry["frames"] = pybind11::list();
      blocks.append(entry);
      allocated += block.free ? 0 : block.size;
      requested += block.requested;
    }
    pybind11::dict entry;
    entry["device"] = static_cast<int>(device);
    entry["address"] = segment.address;
    entry["total_size"] = segment.size;
    entry["allocated_size"] = allocated;
    entry["active_size"] = allocated;
    entry["requested_size"] = requested;
    entry["stream"] = segment.stream;
    entry["segment_type"] = segment.small ? "small" : "large";
    entry["segment_pool_id"] = pybind11::make_tuple(0, 0);
    entry["is_expandable"] = false;
    entry["frames"] = pybind11::list();
    entry["blocks"] = blocks;
    segments.append(entry);
  }
  return segments;
}

} // namespace

void init_device(pybind11::module_& m) {
  install_cpu_allocator();
  register_hooks();
  register_fallback_over_decompositions();

  m.def(
      "_configure_device",
      [](int device_count, uint64_t hbm_bytes, const std::string& name) {
        DeviceConfig config;
        config.device_count = device_count;
        config.hbm_bytes = hbm_bytes;
        config.name = name;
        set_device_config(std::move(config));
      },
      pybind11::arg("device_count"),
      pybind11::arg("hbm_bytes"),
      pybind11::arg("name"));
  m.def("_device_count", [] { return static_cast<int>(device_count()); });
  m.def("_device_name", [] { return device_config().name; });
  m.def("_device_hbm_bytes", [] { return device_config().hbm_bytes; });
  m.def("_check_device", [](int device) { check_device(static_cast<c10::DeviceIndex>(std::clamp(device, -1, 127))); });
  m.def("_is_initialized", &Arena::exists);
  m.def("_in_bad_fork", &Arena::in_bad_fork);
  m.def("_memory_stats", &memory_stats);
  m.def("_memory_segments", &memory_segments);
  m.def("_empty_cache", &empty_cache);
  m.def("_reset_peak_memory_stats", [](c10::DeviceIndex device) { Ledger::of(device).reset_peak_stats(); });
  m.def("_reset_accumulated_memory_stats", [](c10::DeviceIndex device) {
    Ledger::of(device).reset_accumulated_stats();
  });
  m.def("_mem_get_info", [](c10::DeviceIndex device) {
    const Ledger& ledger = Ledger::of(device);
    return std::make_pair(ledger.total_bytes() - ledger.reserved_bytes(), ledger.total_bytes());
  });
  m.def("_set_memory_fraction", [](double fraction, c10::DeviceIndex device) {
    Ledger::of(device).set_memory_fraction(fraction);
  });
  m.def(
      "_synchronize_device",
      [](c10::DeviceIndex device) { synchronize_device(device); },
      pybind11::call_guard<pybind11::gil_scoped_release>());
  m.def("_default_generator", [](c10::DeviceIndex device) { return default_generator(device); });
  m.def("_cpu_rng", &cpu_rng);
  m.def("_set_cpu_rng", &set_cpu_rng);
  m.def("_arena_used_bytes", [] { return Arena::exists() ? Arena::get().used_bytes() : 0; });
}

} // namespace trn
