"""From the loss of a batch to an optimizer step that all ranks take alike."""
