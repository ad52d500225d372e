target_sources(_native PRIVATE
  native/batch/bind.cpp
  native/batch/step.cpp
)
