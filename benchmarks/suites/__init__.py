"""What the benchmark `peer_suites` runs: other libraries' own tests, with offload in the place of what they test."""
