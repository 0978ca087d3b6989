"""Row `tfdata-antialias`: tf.data with the plain loop's resizing."""

from benchmarks.rows.peers import tfdata_row

if __name__ == "__main__":
    tfdata_row.main(antialias=True)
