target_sources(_native PRIVATE
  native/batch/bind.cpp
  native/batch/bind_drafts.cpp
  native/batch/bind_lookup.cpp
  native/batch/bind_logits.cpp
  native/batch/bind_noise.cpp
  native/batch/bind_sampling.cpp
  native/batch/bind_vllm.cpp
  native/batch/directory.cpp
  native/batch/logits.cpp
  native/batch/noise.cpp
  native/batch/packet.cpp
  native/batch/rows.cpp
  native/batch/step.cpp
  native/batch/vllm_fast_path.cpp
)
set_source_files_properties(native/batch/logits.cpp native/batch/noise.cpp PROPERTIES COMPILE_OPTIONS -ffp-contract=off)
