"""``python -m offload``, for environments where the command itself is not on the PATH."""

from offload.cli.main import main

if __name__ == "__main__":
    main(prog_name="offload")
