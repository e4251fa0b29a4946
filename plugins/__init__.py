"""The algorithms, one per file: policy or mathematics, strategy class, paper."""
