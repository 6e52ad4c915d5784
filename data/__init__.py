"""From conversations to feature shards and batches; knows nothing of draft heads."""
