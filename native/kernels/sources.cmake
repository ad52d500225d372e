# Kernel sources are compiled once per instruction set, each into its own namespace (FOREWORD_ISA), and chosen at run
# time by native/kernels/dispatch.cpp. Adding an instruction set: a header in simd/, a line here, a line there.
# What isa_functions.h calls P, Q and B.
set(FOREWORD_PRODUCT_SOURCES activations attention isa kv_store linear packing peaks)
set(FOREWORD_QUAD_SOURCES lora screen)
set(FOREWORD_BASE_SOURCES gguf recurrent row_ops sampler)

# In a unity build (pyproject.toml) the small files of an instruction set are one, and the others are compiled in
# parallel. Files with options of their own are never part of it.
set_source_files_properties(native/kernels/attention.cpp native/kernels/linear.cpp PROPERTIES
                            SKIP_UNITY_BUILD_INCLUSION ON)

# base: the instruction set whose functions without products it has; itself, or one that differs in products alone.
# quads: that whose functions with products of quads it has; itself, or one that differs in products of pairs alone.
function(foreword_add_isa isa base quads)
  set(names ${FOREWORD_PRODUCT_SOURCES})
  if(isa STREQUAL "avx512_amx")  # the other products are those of avx512_bf16
    set(names amx attention)
  endif()
  if(isa STREQUAL quads)
    list(APPEND names ${FOREWORD_QUAD_SOURCES})
  endif()
  if(isa STREQUAL base)
    list(APPEND names ${FOREWORD_BASE_SOURCES})
  endif()
  list(TRANSFORM names REPLACE "(.+)" "native/kernels/\\1.cpp" OUTPUT_VARIABLE sources)
  add_library(foreword_kernels_${isa} OBJECT ${sources})
  target_include_directories(foreword_kernels_${isa} PRIVATE native)
  target_compile_definitions(foreword_kernels_${isa} PRIVATE FOREWORD_ISA=${isa} FOREWORD_BASE=${base}
                             FOREWORD_QUADS=${quads})
  # No contraction: fused multiply-adds are explicit in the source, so that every tile shape rounds alike.
  target_compile_options(foreword_kernels_${isa} PRIVATE ${optimization} -Wall -Wextra -ffp-contract=off -fno-math-errno
                         ${ARGN})
  if(FOREWORD_SANITIZE MATCHES undefined)  # checks of every pointer would take minutes to compile in unrolled loops
    target_compile_options(foreword_kernels_${isa} PRIVATE -fno-sanitize=null,alignment,object-size,vptr)
  endif()
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # GCC bug 105593
    target_compile_options(foreword_kernels_${isa} PRIVATE -Wno-uninitialized -Wno-maybe-uninitialized)
  endif()
  set_target_properties(foreword_kernels_${isa} PROPERTIES CXX_VISIBILITY_PRESET hidden)
  target_sources(_native PRIVATE $<TARGET_OBJECTS:foreword_kernels_${isa}>)
  set(FOREWORD_ISAS "X(${isa}) ${FOREWORD_ISAS}" PARENT_SCOPE)
endfunction()

include(CheckCXXCompilerFlag)
foreword_add_isa(scalar scalar scalar -Os)  # a few percent slower than with -O2, and a quarter smaller
if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64|amd64")
  set(avx2 -mavx2 -mfma -mf16c -mbmi2)
  set(avx512 ${avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512vnni)
  set(avx2_vnni -mavxvnni)
  set(bf16 -mavx512bf16)
  set(tiles -mamx-tile -mamx-bf16 -mamx-int8)
  if(FOREWORD_EMULATE)  # tools/emulate.py
    set(avx2_vnni -DFOREWORD_EMULATE)
    set(bf16 -DFOREWORD_EMULATE)
    set(tiles -DFOREWORD_EMULATE)
    target_compile_definitions(_native PRIVATE FOREWORD_EMULATE)
  endif()
  foreword_add_isa(avx2 avx2 avx2 -DFOREWORD_SIMD_AVX2 ${avx2})
  check_cxx_compiler_flag(-mavxvnni FOREWORD_COMPILER_HAS_AVX_VNNI)
  if(FOREWORD_COMPILER_HAS_AVX_VNNI)
    foreword_add_isa(avx2_vnni avx2 avx2_vnni -DFOREWORD_SIMD_AVX2 -DFOREWORD_SIMD_VNNI ${avx2} ${avx2_vnni})
  endif()
  check_cxx_compiler_flag(-mavx512vnni FOREWORD_COMPILER_HAS_VNNI)
  if(FOREWORD_COMPILER_HAS_VNNI)
    foreword_add_isa(avx512_vnni avx512_vnni avx512_vnni -DFOREWORD_SIMD_AVX512 ${avx512})
  endif()
  check_cxx_compiler_flag(-mavx512bf16 FOREWORD_COMPILER_HAS_BF16)
  if(FOREWORD_COMPILER_HAS_VNNI AND FOREWORD_COMPILER_HAS_BF16)
    foreword_add_isa(avx512_bf16 avx512_vnni avx512_vnni -DFOREWORD_SIMD_AVX512 -DFOREWORD_SIMD_BF16 ${avx512} ${bf16})
  endif()
  check_cxx_compiler_flag(-mamx-bf16 FOREWORD_COMPILER_HAS_AMX)
  if(FOREWORD_COMPILER_HAS_VNNI AND FOREWORD_COMPILER_HAS_BF16 AND FOREWORD_COMPILER_HAS_AMX)
    foreword_add_isa(avx512_amx avx512_vnni avx512_vnni -DFOREWORD_SIMD_AVX512 -DFOREWORD_SIMD_BF16 -DFOREWORD_SIMD_AMX
                     ${avx512} ${bf16} ${tiles})
  endif()
elseif(CMAKE_SYSTEM_PROCESSOR MATCHES "aarch64|arm64|ARM64")
  set(FOREWORD_DOT_PRODUCT -march=armv8.2-a+dotprod CACHE STRING "What the compiler calls the dot product of NEON")
  foreword_add_isa(neon neon neon -DFOREWORD_SIMD_NEON ${FOREWORD_DOT_PRODUCT})
endif()
set_source_files_properties(native/kernels/dispatch.cpp PROPERTIES COMPILE_DEFINITIONS "FOREWORD_ISAS=${FOREWORD_ISAS}"
                            SKIP_UNITY_BUILD_INCLUSION ON)

# The stages of a forward pass, a library of their own so that a unity build compiles them together: -O2 is as fast as
# -O3, and smaller.
add_library(foreword_stages OBJECT
  native/kernels/forward/attention_plan.cpp
  native/kernels/forward/attention_stage.cpp
  native/kernels/forward/connections_stage.cpp
  native/kernels/forward/context.cpp
  native/kernels/forward/embedding_stage.cpp
  native/kernels/forward/forward.cpp
  native/kernels/forward/input.cpp
  native/kernels/forward/index_stage.cpp
  native/kernels/forward/latent_stage.cpp
  native/kernels/forward/logits_stage.cpp
  native/kernels/forward/lora_rows.cpp
  native/kernels/forward/lora_step.cpp
  native/kernels/forward/low_rank.cpp
  native/kernels/forward/mlp_stage.cpp
  native/kernels/forward/moe_stage.cpp
  native/kernels/forward/per_layer_stage.cpp
  native/kernels/forward/products.cpp
  native/kernels/forward/recurrent_stage.cpp
  native/kernels/forward/runs_stage.cpp
  native/kernels/forward/streams_stage.cpp
)
target_include_directories(foreword_stages PRIVATE native)
target_compile_options(foreword_stages PRIVATE -O2 ${stack_protector} -Wall -Wextra)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")  # whose -O2 makes vectors of hardly any loop; these have loops over rows
  set_source_files_properties(native/kernels/forward/mlp_stage.cpp native/kernels/forward/streams_stage.cpp
                              PROPERTIES COMPILE_OPTIONS -fvect-cost-model=dynamic)
endif()
set_target_properties(foreword_stages PROPERTIES CXX_VISIBILITY_PRESET hidden)
target_sources(_native PRIVATE $<TARGET_OBJECTS:foreword_stages>)

target_sources(_native PRIVATE
  native/kernels/bind.cpp
  native/kernels/dispatch.cpp
  native/kernels/encoder.cpp
  native/kernels/kv_cache.cpp
  native/kernels/memory.cpp
  native/kernels/model.cpp
  native/kernels/roofline.cpp
  native/kernels/sampling.cpp
  native/kernels/sampling_rules.cpp
  native/kernels/thread_pool.cpp
)
set_source_files_properties(native/kernels/sampling_rules.cpp PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
if(FOREWORD_SANITIZE MATCHES address)
  set_source_files_properties(native/kernels/memory.cpp PROPERTIES COMPILE_DEFINITIONS FOREWORD_SEPARATE_ARRAYS)
endif()
find_package(Threads REQUIRED)
target_link_libraries(_native PRIVATE Threads::Threads)
