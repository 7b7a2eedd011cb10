// torch.profiler on the device: what was launched while a profile ran, on virtual time, beside the host's side on its own.
//
// Kineto asks a backend for its activities through an IActivityProfiler; the records of the virtual clock become such
// activities. The two clocks are joined at the profile's start: something that begins 5 us of virtual time later is drawn
// 5 us later. Kineto counts in nanoseconds, so times are rounded down to them.
//
// Registered when the extension is loaded.

#define FMT_HEADER_ONLY // for Kineto's headers

#include "device/Device.h"
#include "device/Stream.h"
#include "timing/VirtualClock.h"

#include <c10/util/ApproximateClock.h>
#include <kineto/libkineto.h>
#include <kineto/output_base.h>
#include <torch/csrc/profiler/stubs/base.h>

#include <functional>
#include <memory>
#include <set>
#include <string>
#include <utility>

namespace torch::profiler::impl {
// As in torch/csrc/profiler/standalone/privateuse1_profiler.h, which cannot be included without Kineto's own folder among
// the include paths.
class PrivateUse1ProfilerRegistry {
 public:
  static PrivateUse1ProfilerRegistry& instance();
  void registerFactory(std::function<std::unique_ptr<libkineto::IActivityProfiler>()> factory);
};
} // namespace torch::profiler::impl

namespace trn {

namespace {

using libkineto::ActivityType;
using libkineto::GenericTraceActivity;

constexpr Picoseconds kPsPerNs = 1000;

class ProfilerSession final : public libkineto::IActivityProfilerSession {
 public:
  explicit ProfilerSession(std::set<ActivityType> types) : types_(std::move(types)) {}

  void start() override {
    buffer_ = std::make_unique<libkineto::CpuTraceBuffer>();
    start_ns_ = c10::getTime();
    start_ps_ = start_profile();
    status_ = libkineto::TraceStatus::RECORDING;
  }
  void stop() override {
    records_ = stop_profile();
    buffer_->span = libkineto::TraceSpan(start_ns_, c10::getTime(), "neuron");
    status_ = libkineto::TraceStatus::PROCESSING;
  }
  std::vector<std::string> errors() override {
    return {};
  }
  void processTrace(libkineto::ActivityLogger& logger) override {
    processTrace(logger, [](int32_t) { return nullptr; }, 0, 0);
  }
  void processTrace(
      libkineto::ActivityLogger& logger,
      libkineto::getLinkedActivityCallback linked_activity,
      int64_t /*window_start_ns*/,
      int64_t /*window_end_ns*/) override {
    uint32_t flow = 0;
    for (const ProfiledRecord& profiled : records_) {
      if (profiled.record.activity == Activity::HostWait) {
        continue;
      }
      const auto* linked = linked_activity(profiled.site.correlation);
      flow += 1;
      if (types_.count(ActivityType::PRIVATEUSE1_RUNTIME) > 0) {
        log(logger, launch_of(profiled, flow), linked);
      }
      if (auto activity = activity_of(profiled.record, flow)) {
        log(logger, std::move(activity), linked);
        tracks_.insert({profiled.record.device, profiled.record.stream});
      }
    }
    records_.clear();
    name_devices(logger);
  }
  // Several may take part: they are named in processTrace.
  std::unique_ptr<libkineto::DeviceInfo> getDeviceInfo() override {
    return nullptr;
  }
  std::vector<libkineto::ResourceInfo> getResourceInfos() override {
    std::vector<libkineto::ResourceInfo> infos;
    for (const auto& [device, stream] : tracks_) {
      infos.push_back({stream, stream, device, c10::str("stream ", stream, " (virtual time)")});
    }
    return infos;
  }
  std::unique_ptr<libkineto::CpuTraceBuffer> getTraceBuffer() override {
    return std::move(buffer_);
  }
  void pushCorrelationId(uint64_t id) override {
    push_correlation(static_cast<int32_t>(id));
  }
  void popCorrelationId() override {
    pop_correlation();
  }

 private:
  int64_t ns(Picoseconds time) const {
    return start_ns_ + (time - start_ps_) / kPsPerNs;
  }

  void log(
      libkineto::ActivityLogger& logger,
      std::unique_ptr<GenericTraceActivity> activity,
      const libkineto::ITraceActivity* linked) {
    activity->linked = linked;
    buffer_->activities.push_back(std::move(activity)); // the logger keeps a reference
    logger.handleActivity(*buffer_->activities.back());
  }

  // On the host: the moment of the launch, from which an arrow leads to the device's activity.
  std::unique_ptr<GenericTraceActivity> launch_of(const ProfiledRecord& profiled, uint32_t flow) const {
    auto activity =
        std::make_unique<GenericTraceActivity>(buffer_->span, ActivityType::PRIVATEUSE1_RUNTIME, "neuronLaunch");
    activity->startTime = activity->endTime = profiled.site.host_ns;
    activity->device = libkineto::processId();
    activity->resource = activity->threadId = profiled.site.thread;
    set_flow(*activity, flow, /*start=*/true);
    return activity;
  }

  // Null if activities of its type were not asked for.
  std::unique_ptr<GenericTraceActivity> activity_of(const Record& record, uint32_t flow) const {
    // Without "aten::", which tells it apart from the host's side in a table.
    std::string name = name_of(record.name);
    if (const auto colons = name.find("::"); colons != std::string::npos) {
      name.erase(0, colons + 2);
    }
    const bool copies = name == "copy to host" || name == "copy from host";
    const auto type = copies ? ActivityType::GPU_MEMCPY : ActivityType::CONCURRENT_KERNEL;
    if (types_.count(type) == 0) {
      return nullptr;
    }
    auto activity = std::make_unique<GenericTraceActivity>(buffer_->span, type, name);
    activity->startTime = ns(record.start);
    activity->endTime = ns(record.end);
    activity->device = record.device;
    activity->resource = record.stream;
    set_flow(*activity, flow, /*start=*/false);
    activity->addMetadata("device", static_cast<int>(record.device));
    activity->addMetadata("stream", record.stream);
    if (record.activity == Activity::Collective) {
      activity->addMetadataQuoted("group", name_of(record.group));
      activity->addMetadata("sequence", record.sequence);
      activity->addMetadata("bytes", record.bytes);
      activity->addMetadata("waited for peers (us)", static_cast<double>(record.start - record.ready) / 1e6);
    } else {
      activity->addMetadataQuoted("engine", engine_name(record.engine));
      activity->addMetadataQuoted("bound", record.hbm_bound ? "hbm" : "engine");
      activity->addMetadata("hbm_bytes", record.bytes);
      activity->addMetadata("flops", record.flops);
    }
    return activity;
  }

  static void set_flow(GenericTraceActivity& activity, uint32_t flow, bool start) {
    activity.id = static_cast<int32_t>(flow);
    activity.flow.id = flow;
    activity.flow.type = libkineto::kLinkAsyncCpuGpu;
    activity.flow.start = start ? 1 : 0;
  }

  void name_devices(libkineto::ActivityLogger& logger) const {
    std::set<int32_t> devices;
    for (const auto& [device, stream] : tracks_) {
      if (devices.insert(device).second) {
        logger.handleDeviceInfo(
            {device,
             device + libkineto::kExceedMaxPid,
             c10::str(device_config().name, " (simulated)"),
             c10::str("neuron:", device, ", virtual time")},
            start_ns_);
      }
    }
  }

  const std::set<ActivityType> types_;
  int64_t start_ns_ = 0; // the same moment on the host's clock
  Picoseconds start_ps_ = 0; // and in virtual time
  std::vector<ProfiledRecord> records_;
  std::set<std::pair<int32_t, int32_t>> tracks_; // device and stream
  std::unique_ptr<libkineto::CpuTraceBuffer> buffer_;
};

class Profiler final : public libkineto::IActivityProfiler {
 public:
  const std::string& name() const override {
    static const std::string name = "neuron";
    return name;
  }
  const std::set<ActivityType>& availableActivities() const override {
    static const std::set<ActivityType> types = {
        ActivityType::CONCURRENT_KERNEL, ActivityType::GPU_MEMCPY, ActivityType::PRIVATEUSE1_RUNTIME};
    return types;
  }
  // Null when nothing of the device was asked for: a profile of the host alone.
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      const std::set<ActivityType>& types,
      const libkineto::Config&) override {
    if (types.count(ActivityType::CONCURRENT_KERNEL) == 0 && types.count(ActivityType::GPU_MEMCPY) == 0) {
      return nullptr;
    }
    return std::make_unique<ProfilerSession>(types);
  }
  std::unique_ptr<libkineto::IActivityProfilerSession> configure(
      int64_t /*start_ms*/,
      int64_t /*duration_ms*/,
      const std::set<ActivityType>& types,
      const libkineto::Config& config) override {
    return configure(types, config);
  }
};

// torch.autograd.profiler.profile(use_device="neuron"): an event before and one after each operator, as for CUDA.
struct ProfilerEvents final : public torch::profiler::impl::ProfilerStubs {
  using Event = torch::profiler::impl::ProfilerVoidEventStub;

  void record(c10::DeviceIndex* device, Event* event, int64_t* cpu_ns) const override {
    const c10::DeviceIndex current = current_device();
    if (device != nullptr) {
      *device = current;
    }
    if (cpu_ns != nullptr) {
      *cpu_ns = c10::getTime();
    }
    auto state = std::make_shared<EventState>();
    record_event(*state, current_stream(current));
    *event = std::move(state);
  }
  // Microseconds.
  float elapsed(const Event* from, const Event* to) const override {
    const double ms = elapsed_ms(*static_cast<EventState*>(from->get()), *static_cast<EventState*>(to->get()));
    return static_cast<float>(ms * 1e3);
  }
  void mark(const char*) const override {}
  void rangePush(const char*) const override {}
  void rangePop() const override {}
  bool enabled() const override {
    return true;
  }
  void onEachDevice(std::function<void(int)> op) const override {
    op(current_device());
  }
  void synchronize() const override {
    synchronize_device(current_device());
  }
};

const bool registered = [] {
  namespace profiler = torch::profiler::impl;
  profiler::PrivateUse1ProfilerRegistry::instance().registerFactory([] { return std::make_unique<Profiler>(); });
  static ProfilerEvents events;
  profiler::registerPrivateUse1Methods(&events);
  return true;
}();

} // namespace

} // namespace trn
