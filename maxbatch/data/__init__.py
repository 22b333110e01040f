"""From files to batches: the token store, the stream of samples, the feed."""
