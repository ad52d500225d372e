"""A step in the form that other attention kernels and engines take: one small module each."""
