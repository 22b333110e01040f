"""From positions in the stream to sharded batches."""
