"""Images: decoding, decoding of regions, and the split of a transform between CPU and device."""
