target_sources(_native PRIVATE
  native/batch/bind.cpp
  native/batch/rows.cpp
  native/batch/step.cpp
)
