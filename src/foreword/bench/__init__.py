"""Measurements that `foreword bench`, `calibrate` and the benchmarks share."""
