"""What runs a `DecoderSpec` on an `InputBatch`: `numpy` is short and is the oracle, `native` is the product."""
