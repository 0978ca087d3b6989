"""What the DataLoaders of a job share: Ray, the session of each rank with the feed, the feed with its cores, and the readers."""
