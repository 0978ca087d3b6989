"""The rows of `offload_vs_single`: one module per way to feed a consumer, all speaking the protocol in `protocol`."""
