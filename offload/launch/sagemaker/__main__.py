"""``python -m offload.launch.sagemaker`` is ``offload launch sagemaker``."""

from offload.cli.main import main

if __name__ == "__main__":
    import sys

    main(["launch", "sagemaker", *sys.argv[1:]], prog_name="python -m offload.launch.sagemaker")
