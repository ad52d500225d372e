target_sources(_native PRIVATE
  native/batch/bind.cpp
  native/batch/bind_sampling.cpp
  native/batch/bind_vllm.cpp
  native/batch/directory.cpp
  native/batch/packet.cpp
  native/batch/rows.cpp
  native/batch/step.cpp
  native/batch/vllm_fast_path.cpp
)
