"""Models of Hugging Face transformers over Foreword's batches, their attention replaced by the paged one."""
