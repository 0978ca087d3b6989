"""Row `tfdata`: tf.data in the process that consumes."""

from benchmarks.rows import protocol
from benchmarks.rows.peers import common, tfdata


def main(*, antialias: bool = False) -> None:
    task = protocol.parse()
    batches, conversion_s = tfdata.data(task, antialias=antialias)
    common.answer(task, lambda: batches.prefetch(2), conversion_s)


if __name__ == "__main__":
    main()
