"""From blocks in the object store to this rank's batches on its device."""
