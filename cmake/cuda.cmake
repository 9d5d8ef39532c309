# The CUDA backend, when JAXGEMV_CUDA asks for it or a compiler happens to be here.
if(JAXGEMV_CUDA STREQUAL "OFF")
  return()
endif()

execute_process(COMMAND ${Python_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_nvcc.py
                OUTPUT_VARIABLE nvcc OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
if(NOT nvcc)
  if(JAXGEMV_CUDA STREQUAL "AUTO")
    message(STATUS "jaxgemv: no CUDA compiler, building for the CPU only")
    return()
  endif()
  message(FATAL_ERROR
    "JAXGEMV_CUDA=${JAXGEMV_CUDA}, but there is no CUDA compiler. Do one of these:\n"
    "  - install the CUDA toolkit, 12.0 or newer, and put nvcc on PATH or set CUDA_HOME;\n"
    "  - leave out --no-build-isolation: pip then fetches the compiler by itself;\n"
    "  - install what pip would fetch, the list in cmake/build_backend.py;\n"
    "  - set JAXGEMV_CUDA=OFF to build for the CPU only.")
endif()

# Compilers from wheels keep their libraries in lib, where nvcc does not look.
set(ENV{CUDACXX} ${nvcc})
cmake_path(SET nvcc_lib NORMALIZE "${nvcc}/../../lib")
if(EXISTS ${nvcc_lib}/libcudart_static.a)
  set(ENV{CUDAFLAGS} "$ENV{CUDAFLAGS} -L${nvcc_lib}")
endif()

set(architectures ${CMAKE_CUDA_ARCHITECTURES})
if(NOT architectures)
  set(architectures $ENV{JAXGEMV_CUDA_ARCHITECTURES})
endif()
set(CMAKE_CUDA_ARCHITECTURES 80)  # for CMake's test of the compiler, which may be too old for ours
if(JAXGEMV_CUDA STREQUAL "AUTO")
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(WARNING "jaxgemv: ${nvcc} does not work, building for the CPU only")
    return()
  endif()
endif()
enable_language(CUDA)

# What is for 80 runs on 86 and 89 too, a wheel has less than 25 MB without code of their own, and only for
# float8 has 89 instructions that 80 lacks. The last one also as PTX, which newer GPUs compile for themselves.
if(NOT architectures)
  set(architectures 80-real 90-real 100-real 120)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
    set(architectures 80-real 90-real 90-virtual)
  endif()
  set(beside_float8 89-real)
endif()
# wgmma exists in Hopper's own dialect only, and kernels that need it are compiled for nothing else.
list(TRANSFORM architectures REPLACE "^90(-real)?$" "90a-real")
set(hopper ${architectures})
list(FILTER hopper INCLUDE REGEX "^90a")
if(hopper)
  set(hopper_definition JAXGEMV_HAS_HOPPER_CODE)
else()  # empty kernels, which are never called
  list(GET architectures 0 hopper)
endif()
set(CMAKE_CUDA_ARCHITECTURES ${architectures})
set(CMAKE_CUDA_VISIBILITY_PRESET hidden)
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)  # so that the module loads where there is no CUDA

file(GLOB_RECURSE kernel_sources CONFIGURE_DEPENDS csrc/cuda/*.cu)
file(GLOB hopper_sources CONFIGURE_DEPENDS csrc/cuda/wgmma*/*.cu csrc/cuda/gemm*/*.cu)
list(REMOVE_ITEM kernel_sources ${hopper_sources})
set(float8_sources ${kernel_sources})
list(FILTER float8_sources INCLUDE REGEX "/float8[.]cu$")
list(REMOVE_ITEM kernel_sources ${float8_sources})
set(fatbin_options)
list(LENGTH architectures count)
if(count GREATER 1 AND CMAKE_CUDA_COMPILER_VERSION VERSION_GREATER_EQUAL 13)
  # A quarter of the size, for drivers that CUDA 13 needs anyway; takes seconds a file.
  set(fatbin_options --compress-mode=size)
endif()
add_library(_cuda_kernels OBJECT ${kernel_sources})
add_library(_cuda_float8 OBJECT ${float8_sources})
add_library(_cuda_hopper OBJECT ${hopper_sources})
set_target_properties(_cuda_float8 PROPERTIES CUDA_ARCHITECTURES "${architectures};${beside_float8}")
set_target_properties(_cuda_hopper PROPERTIES CUDA_ARCHITECTURES "${hopper}")
target_compile_definitions(_cuda_hopper PRIVATE ${hopper_definition})
foreach(target _cuda_kernels _cuda_float8 _cuda_hopper)
  set_target_properties(${target} PROPERTIES POSITION_INDEPENDENT_CODE ON)
  # -std by hand: CMake 3.25.1 does not know that nvcc speaks C++20.
  target_compile_options(${target} PRIVATE -std=c++20 -Xcompiler=-Wall,-Wextra,-Werror=switch --threads=0
                         ${fatbin_options})
endforeach()

file(GLOB_RECURSE cuda_sources CONFIGURE_DEPENDS csrc/cuda/*.cc)
jaxgemv_add_backend(_cuda ${cuda_sources} $<TARGET_OBJECTS:_cuda_kernels>
                    $<TARGET_OBJECTS:_cuda_float8> $<TARGET_OBJECTS:_cuda_hopper>)
string(REPLACE ";" "," compiled "${CMAKE_CUDA_ARCHITECTURES}")
target_compile_definitions(_cuda PRIVATE JAXGEMV_CUDA_COMPILED="${compiled}")
target_include_directories(_cuda SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
target_link_options(_cuda PRIVATE LINKER:--wrap=__cudaRegisterFatBinary,--wrap=__cudaRegisterFunction)  # binaries.cc
message(STATUS "jaxgemv: CUDA ${CMAKE_CUDA_COMPILER_VERSION} for ${CMAKE_CUDA_ARCHITECTURES}")
