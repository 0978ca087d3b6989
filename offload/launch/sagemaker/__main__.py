"""``python -m offload.launch.sagemaker`` becomes ``offload launch sagemaker``."""

import os
import sys

if __name__ == "__main__":
    os.execv(sys.executable, [sys.executable, "-m", "offload", "launch", "sagemaker", *sys.argv[1:]])
