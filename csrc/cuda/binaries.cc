// Keeps what nvcc's host code registers with the CUDA runtime when the module is loaded: the linker redirects these
// calls to the wrappers below (cmake/cuda.cmake). The runtime itself does not give it back.
#include "binaries.h"

#include <cstdint>
#include <map>

namespace jaxgemv::cuda {
namespace {

// The layout that `cuobjdump` reads; cuda's fatbinary_section.h declares the first: a wrapper in .nvFatBinSegment
// points to a header, which has its own size and that of all behind it.
struct Wrapper {
  int32_t magic, version;
  const void* data;
};
struct Header {
  uint32_t magic;
  uint16_t version, bytes;
  uint64_t bytes_behind;
};
constexpr int32_t kWrapperMagic = 0x466243b1;
constexpr uint32_t kHeaderMagic = 0xba55ed50;

struct Registry {
  std::map<void**, Binary> binaries;      // by the runtime's handle
  std::map<const void*, Binary> kernels;  // by host function
};
// Written while the module is loaded, and then only read.
Registry& registry() {
  static Registry all;
  return all;
}

}  // namespace

Binary binary_of(const void* kernel) {
  const auto found = registry().kernels.find(kernel);
  return found == registry().kernels.end() ? Binary{} : found->second;
}

}  // namespace jaxgemv::cuda

extern "C" {

void** __real___cudaRegisterFatBinary(void* wrapper);
void __real___cudaRegisterFunction(void** handle, const char* host, char* device, const char* name,
                                   int threads, void* thread, void* block, void* block_dim,
                                   void* grid_dim, int* warp_size);

void** __wrap___cudaRegisterFatBinary(void* of_nvcc) {
  using namespace jaxgemv::cuda;
  void** const handle = __real___cudaRegisterFatBinary(of_nvcc);
  const auto* wrapper = static_cast<const Wrapper*>(of_nvcc);
  if (wrapper->magic != kWrapperMagic) return handle;
  const auto* header = static_cast<const Header*>(wrapper->data);
  if (header->magic == kHeaderMagic)
    registry().binaries[handle] = {header, header->bytes + header->bytes_behind, nullptr};
  return handle;
}

void __wrap___cudaRegisterFunction(void** handle, const char* host, char* device, const char* name,
                                   int threads, void* thread, void* block, void* block_dim,
                                   void* grid_dim, int* warp_size) {
  using namespace jaxgemv::cuda;
  __real___cudaRegisterFunction(handle, host, device, name, threads, thread, block, block_dim,
                                grid_dim, warp_size);
  const auto found = registry().binaries.find(handle);
  if (found == registry().binaries.end()) return;
  Binary binary = found->second;
  binary.name = name;
  registry().kernels[host] = binary;
}

}  // extern "C"
