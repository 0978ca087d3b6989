"""The sources of samples: folders of images, Parquet files, tar shards, and torch data sets."""
