// XLA's record stage: the same call as `execute`, whose launches become commands.
#include "record.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <iterator>
#include <map>
#include <mutex>
#include <tuple>
#include <vector>

#include "binaries.h"
#include "handler.h"
#include "record_abi.h"
#include "xla/ffi/api/c_api.h"

namespace jaxgemv::cuda {
namespace {

namespace abi = record_abi;

// What a command launches. An update of a call that now chooses another kernel or grid must not give it these
// arguments.
struct Launch {
  const void* kernel;
  LaunchShape shape;

  bool operator==(const Launch& other) const {
    const auto all = [](const Launch& l) {
      const LaunchShape& s = l.shape;
      return std::tuple(l.kernel, s.grid.x, s.grid.y, s.grid.z, s.threads, s.shared_bytes, s.ranks);
    };
    return all(*this) == all(other);
  }
};

// An entry is overwritten when its address is used again.
class Launches {
 public:
  void set(const abi::Command* command, const Launch& launch) {
    const std::scoped_lock lock(mutex_);
    of_.insert_or_assign(command, launch);
  }
  bool is(const abi::Command* command, const Launch& launch) {
    const std::scoped_lock lock(mutex_);
    const auto found = of_.find(command);
    return found != of_.end() && found->second == launch;
  }

 private:
  std::mutex mutex_;
  std::map<const abi::Command*, Launch> of_;
};
Launches& launches() {
  static Launches all;
  return all;
}

void destroy(const XLA_FFI_Api* api, void* error) {
  XLA_FFI_Error_Destroy_Args args{};
  args.struct_size = XLA_FFI_Error_Destroy_Args_STRUCT_SIZE;
  args.error = static_cast<XLA_FFI_Error*>(error);
  api->XLA_FFI_Error_Destroy(&args);
}

XLA_FFI_Error* error_of(const XLA_FFI_CallFrame* call, const char* message) {
  XLA_FFI_Error_Create_Args args{};
  args.struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE;
  args.message = message, args.errc = XLA_FFI_Error_Code_INTERNAL;
  return call->api->XLA_FFI_Error_Create(&args);
}

std::atomic<int64_t> nodes = 0;

class XlaRecorder final : public Recorder {
 public:
  XlaRecorder(const XLA_FFI_CallFrame* call, const abi::Frame& frame)
      : call_(call), frame_(frame) {}

  cudaError_t add(const void* kernel, const LaunchShape& shape,
                  std::span<const Argument> arguments) override {
    if (captures_) return cudaSuccess;
    std::vector<abi::KernelArg> each;
    for (const Argument& argument : arguments)
      each.push_back({argument.data, static_cast<int64_t>(argument.size), abi::kHostValue});
    const abi::KernelArgs args{each.data(), static_cast<int64_t>(each.size())};
    const Launch launch{kernel, shape};
    return frame_.action == abi::kCreate ? create(launch, args) : update(launch, args);
  }

  cudaError_t capture() override {
    if (captures_) return cudaSuccess;
    captures_ = true;
    return checked(frame_.api->request_capture(frame_.context));
  }

  // The error that is to be returned to XLA, or null.
  XLA_FFI_Error* error() const { return error_; }

 private:
  cudaError_t create(const Launch& launch, const abi::KernelArgs& args) {
    const LaunchShape& shape = launch.shape;
    const Binary binary = binary_of(launch.kernel);
    if (binary.data == nullptr || *frame_.count > 0) return cudaErrorInvalidKernelImage;
    const auto number = [](unsigned n) { return static_cast<int32_t>(n); };
    abi::LaunchDims dims{{number(shape.grid.x), number(shape.grid.y), number(shape.grid.z)},
                         {shape.threads, 1, 1},
                         {}};
    if (shape.ranks > 1) dims.cluster = {shape.ranks, 1, 1};
    const abi::Command*& made = frame_.commands[0];
    const cudaError_t status = checked(frame_.api->create_launch(
        frame_.context, binary.name, binary.data, static_cast<int64_t>(binary.size), abi::kCubin,
        dims, static_cast<uint32_t>(shape.shared_bytes), shape.early, &args, nullptr, 0, &made));
    if (status != cudaSuccess) return status;
    launches().set(made, launch), ++nodes;
    *frame_.count = 1;
    return cudaSuccess;
  }

  cudaError_t update(const Launch& launch, const abi::KernelArgs& args) {
    const abi::Command* const command = *frame_.count > 0 ? frame_.commands[0] : nullptr;
    if (!launches().is(command, launch)) {
      error_ = error_of(
          call_,
          "jaxgemv: XLA's graph has another kernel for this call than is chosen now; compile the "
          "program again after use_only");
      return cudaErrorGraphExecUpdateFailure;
    }
    return checked(frame_.api->update_launch(frame_.context, command, &args));
  }

  cudaError_t checked(abi::Error* error) {
    if (error == nullptr) return cudaSuccess;
    error_ = reinterpret_cast<XLA_FFI_Error*>(error);
    return cudaErrorUnknown;
  }

  const XLA_FFI_CallFrame* const call_;
  const abi::Frame& frame_;
  bool captures_ = false;
  XLA_FFI_Error* error_ = nullptr;
};

// Null where XLA has no such extension, or one of another version.
const abi::Frame* frame_of(const XLA_FFI_CallFrame* call) {
  if (call->api->struct_size < abi::kFindExtensionAt + sizeof(void*)) return nullptr;
  const auto find = *reinterpret_cast<abi::Find* const*>(reinterpret_cast<const char*>(call->api) +
                                                         abi::kFindExtensionAt);
  abi::FindExtension args{sizeof(abi::FindExtension), nullptr, call->ctx, abi::kType, nullptr};
  if (abi::Error* const error = find(&args)) return destroy(call->api, error), nullptr;
  if (args.found == nullptr) return nullptr;
  const auto is_it = [&](const abi::Version& version) {
    return args.found->major == version.major && args.found->minor == version.minor;
  };
  if (std::none_of(std::begin(abi::kVersions), std::end(abi::kVersions), is_it)) return nullptr;
  return reinterpret_cast<const abi::RecordExtension*>(args.found)->frame;
}

XLA_FFI_Error* record(XLA_FFI_CallFrame* call) {
  const auto execute = reinterpret_cast<XLA_FFI_Handler*>(gemv_handler());
  if (call->extension_start != nullptr) return execute(call);  // XLA asks for metadata
  const abi::Frame* const frame = frame_of(call);
  if (frame == nullptr)
    return error_of(
        call,
        "jaxgemv: XLA's record stage is not that of the jaxlib whose headers are installed; "
        "JAXGEMV_RECORD=0 does without it");
  XlaRecorder of_call(call, *frame);
  recorder() = &of_call;
  const XLA_FFI_ExecutionStage stage = call->stage;
  call->stage = XLA_FFI_ExecutionStage_EXECUTE;
  XLA_FFI_Error* const error = execute(call);
  call->stage = stage;
  if (error == nullptr && *frame->count == 0) of_call.capture();  // empty: XLA wants a node
  recorder() = nullptr;
  if (of_call.error() == nullptr) return error;
  // In place of the error that execute made of it.
  if (error != nullptr) destroy(call->api, error);
  return of_call.error();
}

// Registers the target with a record stage, and without if XLA will not have it.
abi::Error* register_target(const XLA_FFI_Api* api, const char* name) {
  abi::Error* error = nullptr;
  for (void* const stage : {reinterpret_cast<void*>(record), static_cast<void*>(nullptr)}) {
    abi::Register args{sizeof(abi::Register), nullptr, {name, std::strlen(name)},
                       {"CUDA", 4},           {},      0};
    args.bundle.execute = gemv_handler(), args.bundle.record = stage;
    error = reinterpret_cast<abi::Error* (*)(abi::Register*)>(api->XLA_FFI_Handler_Register)(&args);
    if (error == nullptr) break;
    if (stage != nullptr) destroy(api, error);
  }
  return error;
}

const char* target = nullptr;

XLA_FFI_Error* announce(XLA_FFI_CallFrame* call) {
  if (call->extension_start == nullptr) return error_of(call, "jaxgemv: this is no operation");
  if (abi::Error* const error = register_target(call->api, target))
    return reinterpret_cast<XLA_FFI_Error*>(error);
  return reinterpret_cast<XLA_FFI_Handler*>(gemv_handler())(call);
}

}  // namespace

int64_t recorded() { return nodes; }

void* recording_handler(const char* name) {
  target = name;
  return reinterpret_cast<void*>(announce);
}

}  // namespace jaxgemv::cuda
