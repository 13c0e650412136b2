"""Apache Beam transforms: reading, decoding, scoring and testing as a pipeline."""
