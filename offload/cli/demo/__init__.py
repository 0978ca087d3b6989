"""What ``offload demo`` trains, and its comparison of two loaders."""
